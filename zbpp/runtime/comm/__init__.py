"""Messages between stages: `transport` says what there is, for one process.

`distributed` does the same over torch.distributed: `messages` are values, `wire` sends
their tensors through `channels`, `header` and `shapes` tell what they look like;
`process_group` joins the processes.
"""
