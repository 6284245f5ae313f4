"""Storage of `torch.distributed.checkpoint` (DCP) in safetensors files.

DCP's planners say which part of which tensor goes where, also for sharded ones. Its own
file writer keeps an index that is a pickle; here the index is JSON, in the manifest. A
process writes one file; nothing is sent between processes. Importing DCP takes a
second, so this module is imported by what saves or loads, when it does.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.futures import Future

from zbpp.checkpoint.tensor_files import (
    DTYPES,
    TensorIndex,
    dtype_name,
    raw,
    read_header,
    write_file,
)

__all__ = ["FileReader", "FileWriter", "read_tensors", "write_tensors"]


class FileWriter(StorageWriter):
    """Writes what one process holds into one file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes, self.sha256 = 0, ""
        """Of the file, once it is written."""
        self.index: TensorIndex = {}
        """Of this process's tensors, once they are written."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew."""
        self.index = {}

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """As planned."""
        return plans

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> "Future[list[WriteResult]]":
        """Write all parts of tensors of a plan."""
        parts: dict[str, Tensor] = {}
        results = []
        for item in plan.items:
            key = _key(item.index)
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor), f"{key} is no tensor"
            parts[key] = data.detach().cpu().contiguous()
            results.append(WriteResult(item.index, parts[key].nbytes, key))
        self.bytes, self.sha256 = write_file(self._path, parts)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Note which part is where."""
        keys = {one.index: one.storage_data for part in results for one in part}
        for name, held in metadata.state_dict_metadata.items():
            assert isinstance(held, TensorStorageMetadata)
            self.index[name] = {
                "dtype": dtype_name(held.properties.dtype),
                "shape": list(held.size),
                "chunks": [
                    {
                        "file": self._path.name,
                        "key": keys[MetadataIndex(name, chunk.offsets)],
                        "offsets": list(chunk.offsets),
                        "sizes": list(chunk.sizes),
                    }
                    for chunk in held.chunks
                ],
            }

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Paths are made by hand."""
        return False


@dataclass(frozen=True)
class _Part:
    file: str
    key: str
    sizes: torch.Size
    dtype: torch.dtype


class FileReader(StorageReader):
    """Reads the tensors of a checkpoint.

    Args:
        folder: with the files.
        index: of all tensors, as the manifest has it.
    """

    def __init__(self, folder: Path, index: TensorIndex) -> None:
        self._folder, self._index = folder, index

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, in DCP's words."""
        tensors: dict[str, TensorStorageMetadata] = {}
        places: dict[MetadataIndex, _Part] = {}
        for name, held in self._index.items():
            chunks, dtype = [], DTYPES[held["dtype"]]
            for chunk in held["chunks"]:
                offsets, sizes = (
                    torch.Size(chunk["offsets"]),
                    torch.Size(chunk["sizes"]),
                )
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                index = MetadataIndex(name, offsets)
                places[index] = _Part(chunk["file"], chunk["key"], sizes, dtype)
            properties = TensorProperties(dtype=dtype)
            size = torch.Size(held["shape"])
            tensors[name] = TensorStorageMetadata(properties, size, chunks)
        return Metadata(dict(tensors), storage_data=places, storage_meta=StorageMeta())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep the places."""
        self._places: dict[MetadataIndex, _Part] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        """Read all parts of tensors of a plan, file by file."""
        items: dict[str, list[Any]] = {}
        for item in plan.items:
            items.setdefault(self._places[item.storage_index].file, []).append(item)
        for name, wanted in items.items():
            extents = read_header(self._folder / name)
            with (self._folder / name).open("rb") as file:
                for item in wanted:
                    place = self._places[item.storage_index]
                    extent = extents[place.key]
                    if (extent.shape, extent.dtype) != (place.sizes, place.dtype):
                        raise ValueError(f"{place.key} in {name} is of another kind")
                    part = torch.empty(extent.shape, dtype=extent.dtype)
                    file.seek(extent.first)
                    if file.readinto(raw(part)) != part.nbytes:
                        raise ValueError(f"{name} is cut off")
                    for dim, (at, length) in enumerate(
                        zip(item.storage_offsets, item.lengths, strict=True)
                    ):
                        part = part.narrow(dim, at, length)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Paths are made by hand."""
        return False


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileWriter:
    """Write what this process holds, by DCP's plan for it.

    Raises:
        OSError: the disk is full, or has failed.
    """
    writer, planner = FileWriter(path), DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [results])
    return writer


def read_tensors(
    folder: Path, index: TensorIndex, names: Mapping[str, Tensor] | set[str]
) -> dict[str, Tensor]:
    """Read tensors by DCP's plan for them.

    Args:
        folder: of the checkpoint.
        index: of its tensors.
        names: tensors to fill (they may be sharded), or names, for new ones on the CPU.

    Raises:
        ValueError: a file is damaged.
        OSError: it cannot be read.
    """
    if isinstance(names, Mapping):
        into = dict(names)
    else:
        into = {
            name: torch.empty(index[name]["shape"], dtype=DTYPES[index[name]["dtype"]])
            for name in sorted(names)
        }
    reader, planner = (
        FileReader(folder, index),
        DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
    )
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(into), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    (plan,) = planner.create_global_plan([planner.create_local_plan()])
    reader.read_data(planner.finish_plan(plan), planner).wait()
    return into


def _key(index: MetadataIndex) -> str:
    """A name in the file; parts of one tensor differ by their places."""
    if index.offset is None or not any(index.offset):
        return index.fqn
    return f"{index.fqn}@{','.join(map(str, index.offset))}"
