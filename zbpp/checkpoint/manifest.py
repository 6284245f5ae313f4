"""The manifest of a checkpoint: all that is not a tensor, and the hashes of the files.

    step-00000012/
        manifest.json          written last, with a hash of itself
        stage-0.safetensors    written by the process of stage 0
        ...

A folder without a manifest is no checkpoint. It is JSON: nothing in it is executed.
"""

import hashlib
import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from zbpp.checkpoint.tensor_files import DTYPES, TensorIndex
from zbpp.core import RequestError

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Manifest",
    "damaged",
    "read_manifest",
    "sha256_of",
    "sync_folder",
    "write_durably",
]

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "zbpp-checkpoint", 1
_LONGEST = 2**29
"""Bytes of a manifest: a million tensors take half of it."""


class CheckpointError(RequestError):
    """A checkpoint is damaged or not there, or could not be written."""


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint without its tensors.

    Args:
        step: steps that were done.
        run: mode, stages, micro-batches and split of the run that saved; for people.
        files: bytes and sha256 of each file.
        tensors: shape, kind and place of each tensor.
        aliases: other names of tied tensors.
        values: the rest of the state, as `zbpp.checkpoint.values.encode` writes it.
    """

    step: int
    run: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]]
    tensors: TensorIndex
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The file's content."""
        body = {"format": _FORMAT, "version": _VERSION, **vars(self)}
        return json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint; its files are not looked at.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    path = folder / MANIFEST
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode) or about.st_size > _LONGEST:
            raise CheckpointError(
                f"{path} is no manifest: it is no file of at most {_LONGEST:,} bytes"
            )
        body = json.loads(path.read_bytes())
        told = body.pop("sha256")
        name, version = body.pop("format"), body.pop("version")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: {folder} is no checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except CheckpointError:
        raise
    except (*_WRONG, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if name != _FORMAT or version != _VERSION:
        raise CheckpointError(
            f"{path} is a {name} of version {version}; this zbpp reads {_FORMAT} of "
            f"version {_VERSION}"
        )
    if told != _digest({"format": name, "version": version, **body}):
        raise CheckpointError(f"{path} is damaged: it does not have the hash it tells")
    try:
        manifest = Manifest(**body)
        _check(manifest)
    except _WRONG as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return manifest


_WRONG = (ValueError, KeyError, AttributeError, TypeError)
"""Errors of whoever reads JSON that is not what the reader takes it for."""


def _check(manifest: Manifest) -> None:
    """Refuse what is no path in the folder, no size, or not all of a tensor.

    The hash tells that the text is whole, not that a sound writer has written it.
    """
    _whole("step", manifest.step)
    for name, told in manifest.files.items():
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise ValueError(f"{name!r} is no name of a file in the folder")
        _whole(f"the bytes of {name}", told["bytes"])
        if not isinstance(told["sha256"], str):
            raise ValueError(f"the hash of {name} is no text")
    for name, held in manifest.tensors.items():
        _check_tensor(name, held, manifest.files)
    texts = (*manifest.aliases.values(), *manifest.aliases)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("an alias is no name")
    tables = (manifest.run, manifest.values)
    parts = (manifest.values.get(part, {}) for part in ("optimizer", "extra_states"))
    if not all(isinstance(table, dict) for table in (*tables, *parts)):
        raise ValueError("run, values, or a part of the values is no table")


def _check_tensor(
    name: str, held: Mapping[str, Any], files: Mapping[str, Mapping[str, Any]]
) -> None:
    """The parts of a tensor are in the files, within it, apart, and all of it."""
    shape, itemsize = held["shape"], DTYPES[held["dtype"]].itemsize
    boxes: list[list[tuple[int, int]]] = []
    for chunk in held["chunks"]:
        corner, sizes = chunk["offsets"], chunk["sizes"]
        for number in (*shape, *corner, *sizes):
            _whole(f"a place in {name}", number)
        boxes.append([(a, a + n) for a, n in zip(corner, sizes, strict=True)])
        within = all(b <= n for (_, b), n in zip(boxes[-1], shape, strict=True))
        if not within or not isinstance(chunk["key"], str):
            raise ValueError(f"a part of {name} is not in it")
        if math.prod(sizes) * itemsize > files[chunk["file"]]["bytes"]:
            raise ValueError(f"a part of {name} is larger than its file")
    overlap = any(
        all(max(a, c) < min(b, d) for (a, b), (c, d) in zip(one, two, strict=True))
        for one, two in combinations(boxes, 2)
    )
    covered = sum(math.prod(b - a for a, b in box) for box in boxes)
    if not boxes or overlap or covered != math.prod(shape):
        raise ValueError(f"the parts of {name} are not the whole of it, each once")


def _whole(what: str, number: object) -> None:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{what} is {number!r:.40}, no whole number from 0 on")


def damaged(folder: Path, manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Words about each of these files that is not what was written."""
    found = []
    for name in files:
        told, path = manifest.files[name], folder / name
        try:
            about = path.stat()
            size = about.st_size
            if not stat.S_ISREG(about.st_mode):
                found.append(f"{path} is no file")
            elif size != told["bytes"]:
                found.append(f"{path} has {size:,} bytes, not {told['bytes']:,}")
            elif sha256_of(path) != told["sha256"]:
                found.append(f"{path} does not have the hash that the manifest tells")
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror}")
    return found


def sha256_of(path: Path) -> str:
    """Hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Write a text file all or nothing, and wait until the disk has it."""
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names in a folder."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
