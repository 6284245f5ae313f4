"""The manifest of a checkpoint: all that is not a tensor, and the hashes of the files.

    step-00000012/
        manifest.json          written last, with a hash of itself
        stage-0.safetensors    written by the process of stage 0
        ...

A folder without a manifest is no checkpoint. It is JSON: nothing in it is executed.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
        body = json.loads(path.read_bytes())
        told = body.pop("sha256")
        name, version = body.pop("format"), body.pop("version")
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: {folder} is no checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
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
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!r}") from error
    return manifest


def _check(manifest: Manifest) -> None:
    """Look at what is used as a path or a kind; the hash is right, so it is ours."""
    names = set(manifest.files)
    if any(Path(name).name != name or name in ("", "..") for name in names):
        raise KeyError("a file outside of the folder")
    for name, held in manifest.tensors.items():
        if held["dtype"] not in DTYPES or not held["chunks"]:
            raise KeyError(name)
        if not {chunk["file"] for chunk in held["chunks"]} <= names:
            raise KeyError(f"the file of {name}")


def damaged(folder: Path, manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Words about each of these files that is not what was written."""
    found = []
    for name in files:
        told, path = manifest.files[name], folder / name
        try:
            size = path.stat().st_size
            if size != told["bytes"]:
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
