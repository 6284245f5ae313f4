"""Models from files alone.

causal_lm    layers and a batch of a causal language model of transformers
text_model   `TextModel`: what a training on text asks of a model
byte_model   such models of transformers, whose tokens are bytes
"""
