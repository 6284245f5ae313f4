"""Models from files alone.

causal_lm    layers and a batch of a causal language model of transformers
byte_model   such models whose tokens are bytes; `TextModel`: what a training on text
             asks of a model
"""
