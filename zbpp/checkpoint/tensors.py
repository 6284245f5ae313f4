"""Tensors of a checkpoint: gathered, copied to the host, written, read, put back.

Files are those of the `safetensors` package. A tensor that is sharded over processes
(DTensor) is saved whole and loaded shard by shard, so that a checkpoint knows no mesh
and fits any other, and the plain model.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from zbpp.checkpoint.manifest import CheckpointError, TensorIndex
from zbpp.core import RequestError
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.sharded import is_sharded

__all__ = [
    "HostCopies",
    "TensorReader",
    "copy_into",
    "shard_like",
    "whole",
    "write_tensors",
]


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every process that holds a shard of it must call."""
    return cast(Any, tensor.detach()).full_tensor() if is_sharded(tensor) else tensor


@torch.no_grad()
def shard_like(value: Tensor, like: Tensor) -> Tensor:
    """A value sharded as another tensor is; whole where that is, or of other shape.

    Args:
        value: whole, the same on every process, or sharded in any way.
        like: a parameter or buffer, for instance.
    """
    if not is_sharded(like) or value.shape != like.shape:
        return whole(value)
    from torch.distributed.tensor import distribute_tensor

    sharded, tensor = cast(Any, like), cast(Any, value)
    mesh, placements = sharded.device_mesh, sharded.placements
    if is_sharded(value) and (tensor.device_mesh, tensor.placements) == (
        mesh,
        placements,
    ):
        return value
    # no source: every process cuts its shard out of its own copy, and nothing is sent
    return distribute_tensor(whole(value), mesh, placements, src_data_rank=None)


@torch.no_grad()
def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy a value, whole or sharded in any way, into a parameter or buffer."""
    target.copy_(shard_like(value, target))


class HostCopies:
    """Copies of tensors in host memory, which is kept from one save to the next.

    A save blocks its caller for these copies only. Memory that was used before is
    written at several times the speed of fresh memory, whose pages are cleared one by
    one.
    """

    def __init__(self) -> None:
        self._before: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._are_on_the_way = False

    def begin(self) -> None:
        """Start anew; the memory of the copies that were taken is used again."""
        self._before, self._copies = self._copies, {}

    def take(self, name: str, tensor: Tensor) -> None:
        """Copy a tensor of any device, which may go at once."""
        copy, is_async = self._before.get(name), runs_ahead(tensor.device)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_async
            )
        self._copies[name] = copy.copy_(tensor.detach(), non_blocking=is_async)
        self._are_on_the_way |= is_async

    def finish(self) -> dict[str, Tensor]:
        """Wait for the copies, and give them by name; they are good until `begin`."""
        self._before = {}
        if self._are_on_the_way:
            torch.accelerator.synchronize()
        self._are_on_the_way = False
        return self._copies


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> TensorIndex:
    """Write a safetensors file, wait until the disk has it, and read it back.

    Args:
        path: of the file, overwritten if it exists.
        tensors: on the CPU, contiguous, none in the memory of another.

    Returns:
        What the file holds.

    Raises:
        CheckpointError: it cannot be written: the disk is full, for instance.
    """
    safetensors = _safetensors()
    from safetensors.torch import save_file

    index: TensorIndex = {}
    try:
        save_file(dict(tensors), path)
        # the package makes files that only their owner may read
        path.chmod(path.parent.stat().st_mode & 0o666)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        with safetensors.safe_open(path, framework="pt") as file:
            for name, tensor in tensors.items():
                if not torch.equal(_bytes(file.get_tensor(name)), _bytes(tensor)):
                    raise CheckpointError(f"{path} does not hold what was written")
                index[name] = {
                    "dtype": file.get_slice(name).get_dtype(),
                    "shape": list(tensor.shape),
                    "file": path.name,
                }
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    except KeyError as error:  # so the package says that its format has no such dtype
        raise CheckpointError(f"safetensors files hold no {error.args[0]}") from error
    return index


def _bytes(tensor: Tensor) -> Tensor:
    """As numbers that are equal where the bits are: a NaN is, and -0.0 is not 0.0."""
    return tensor.reshape(-1).view(torch.uint8)


class TensorReader:
    """Reads tensors of a checkpoint, each when it is asked for.

    Args:
        folder: of the checkpoint, whose files are verified.
        index: of the tensors, as the manifest has it.
    """

    def __init__(self, folder: Path, index: TensorIndex) -> None:
        self._folder, self._index = folder, index
        self._files: dict[str, Any] = {}

    def read(self, name: str) -> Tensor:
        """A new tensor on the CPU.

        Raises:
            CheckpointError: the files do not hold it as the index says.
        """
        safetensors = _safetensors()
        if name not in self._index:
            raise CheckpointError(f"{self._folder} has no tensor {name!r:.80}")
        entry = self._index[name]
        path = self._folder / entry["file"]
        try:
            file = self._files.get(path.name)
            if file is None:
                file = safetensors.safe_open(path, framework="pt")
                self._files[path.name] = file
            part = file.get_slice(name)
            if (part.get_dtype(), part.get_shape()) != (entry["dtype"], entry["shape"]):
                raise CheckpointError(f"{name} in {path} is of another kind")
            # a copy: the file may be removed, or cut off, while the tensor lives
            tensor: Tensor = file.get_tensor(name).clone()
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        return tensor


def _safetensors() -> Any:
    try:
        import safetensors
    except ImportError as error:
        raise RequestError(
            "checkpoints need the package safetensors: pip install 'zbpp[train]'"
        ) from error
    return safetensors
