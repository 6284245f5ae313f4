"""Models from configuration files alone: `causal_lm` makes layers and a batch."""
