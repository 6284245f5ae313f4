"""Checkpoints that fit any number of stages, any schedule, and the plain model.

values            numbers and texts as JSON; nothing is ever unpickled
tensor_files      tensors as safetensors files
storage           the same for `torch.distributed.checkpoint`, which plans the parts
manifest          index, hashes and the rest of the state
folder            a folder of checkpoints: the newest, and how many stay
owned             parameters and buffers by the model's own names
optimizer_state, scheduler_state
state             all of it: what is saved, read, checked, loaded
staging, saving   in the background, all or nothing
plain, export, adapter   without a pipeline
"""

from zbpp.checkpoint.adapter import export_adapter
from zbpp.checkpoint.export import export_safetensors
from zbpp.checkpoint.folder import newest
from zbpp.checkpoint.manifest import CheckpointError
from zbpp.checkpoint.plain import load, read_model

__all__ = [
    "CheckpointError",
    "export_adapter",
    "export_safetensors",
    "load",
    "newest",
    "read_model",
]
