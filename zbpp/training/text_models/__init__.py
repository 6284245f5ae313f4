"""Models that `zbpp train` trains on bytes beside its own Llama.

text_model   `TextModel`: sizes, layers and batches, of whatever kind
causal_lm    models of transformers: ``--model hf:PATH``
"""
