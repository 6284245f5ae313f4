"""Checkpoints that fit any number of stages, any schedule, and the plain model.

To be read in this order:

format      files: shards with hashes, and JSON; nothing is ever unpickled
folder      of checkpoints: the newest whole one, how many stay, the lock
model, optimizers   what a process has, by the model's own names
save        in the background, all or nothing
state       all of it: what is saved, read, checked, loaded, and of a pipeline
plain       without a pipeline
"""

from zbpp.checkpoint.folder import locked, newest
from zbpp.checkpoint.format import CheckpointError
from zbpp.checkpoint.plain import load, plain_state, read_model

__all__ = [
    "CheckpointError",
    "load",
    "locked",
    "newest",
    "plain_state",
    "read_model",
]
