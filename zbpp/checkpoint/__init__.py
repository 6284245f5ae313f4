"""Checkpoints that fit any number of stages, any schedule, and the plain model.

To be read in this order:

format      files: shards with hashes, and JSON; nothing is ever unpickled
folder      of checkpoints: the newest whole one, how many stay, the lock
local       the state of a process, by the model's names; compared and loaded
save        in the background, all or nothing
state       the state of a run, and of the stages of a pipeline
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
