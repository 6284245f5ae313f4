"""Encoders with decoders: the decoder is cut, the first layer runs the whole encoder.

The encoder's states travel along with the hidden state, as all blocks read them. What
else runs before the blocks, and after them, is found by a run.
"""

from zbpp.models.family import Family

__all__ = ["BART", "T5"]

T5 = Family("decoder.block", ())
"""Its blocks hand on a bias of positions, which the first one computes."""

BART = Family("decoder.layers", ())
