"""Models from files alone: layers and a batch of causal ones of transformers."""
