"""Checkpoints that fit any number of stages, any schedule, and the plain model.

To be read in this order:

values      numbers and texts as JSON; nothing is ever unpickled
manifest    index, hashes and the rest of the state
tensors     sharded or whole, in safetensors files
experts     parts of tensors, each on its process
folder      of checkpoints: the newest whole one, how many stay, the lock
model, optimizers   what a process holds, by the model's own names
saving      in the background, all or nothing
state       all of it: what is saved, read, checked, loaded
plain       without a pipeline
"""

from zbpp.checkpoint.folder import last_step, locked, newest
from zbpp.checkpoint.manifest import CheckpointError
from zbpp.checkpoint.plain import load, plain_state, read_model

__all__ = [
    "CheckpointError",
    "last_step",
    "load",
    "locked",
    "newest",
    "plain_state",
    "read_model",
]
