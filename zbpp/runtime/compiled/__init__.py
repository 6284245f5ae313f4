"""Compiled parts of a model whose weight gradients wait for W; it knows no pipeline.

Read `cut` (what is taken off a compiled backward) with `recipe` (how it is computed
later), then `region` (what runs in B), `backend` (how torch.compile comes by here) and
`layers` (which calls of a model's layers are compiled).
"""
