"""One chunk a stage: `problem`, then `list_scheduler`, `seeds` and `search`."""
