"""Compiled parts of a model whose weight gradients wait for W; it knows no pipeline."""
