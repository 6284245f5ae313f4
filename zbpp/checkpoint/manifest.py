"""The manifest of a checkpoint: all that is not a tensor, and the hashes of the files.

    step-00000012/
        manifest.json          written last, with a hash of itself
        stage-0.safetensors    written by the process of stage 0
        ...

A folder without a manifest is no checkpoint. The manifest is JSON: nothing in it is
executed.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zbpp.core import RequestError

__all__ = [
    "MANIFEST",
    "CheckpointError",
    "Manifest",
    "TensorIndex",
    "damaged",
    "read_manifest",
    "sha256_of",
    "sync_folder",
    "write_durably",
]

MANIFEST = "manifest.json"
_FORMAT, _VERSION = "zbpp-checkpoint", 2
_MAX_BYTES = 2**29
"""Of a manifest: a million tensors take half of it."""

TensorIndex = dict[str, dict[str, Any]]
"""``dtype``, ``shape`` and ``file`` by tensor."""


class CheckpointError(RequestError):
    """A checkpoint is damaged or not there, or could not be written."""


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint, or of one process's part, without its tensors.

    Args:
        step: steps that were done.
        run: mode, stages, micro-batches and split of the run that saved; for people.
        files: bytes and sha256 of each file.
        tensors: shape, dtype and place of each tensor.
        aliases: other names of tied tensors.
        values: the rest of the state, as `zbpp.checkpoint.values.encode` writes it.
    """

    step: int
    run: Mapping[str, Any]
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tensors: TensorIndex = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The content of the file."""
        body = {"format": _FORMAT, "version": _VERSION, **vars(self)}
        return json.dumps({**body, "sha256": _digest(body)}, indent=1) + "\n"


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """Read and check a manifest in a folder; the files of tensors are not looked at.

    Raises:
        CheckpointError: it is missing, damaged, or of another version.
    """
    path = folder / name
    try:
        status = path.stat()
        # a pipe would be waited for, and a sparse file of any size can be made
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            raise CheckpointError(
                f"{path} is no manifest: it is no file of at most {_MAX_BYTES:,} bytes"
            )
        body = json.loads(path.read_bytes())
        sha256 = body.pop("sha256")
        kind, version = body["format"], body["version"]
        if (kind, version) != (_FORMAT, _VERSION):
            raise CheckpointError(
                f"{path} is a {kind} of version {version}; this zbpp reads {_FORMAT} "
                f"of version {_VERSION}"
            )
        if sha256 != _digest(body):
            raise ValueError("its text does not have the hash that it states")
        del body["format"], body["version"]
        manifest = Manifest(**body)
        _check(manifest)
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is missing: {folder} is no checkpoint"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    except (*_NOT_A_MANIFEST, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    return manifest


_NOT_A_MANIFEST = (ValueError, KeyError, AttributeError, TypeError)
"""The errors of reading JSON that is not what the reader takes it for."""


def _check(manifest: Manifest) -> None:
    """Refuse what is no path in the folder, or no size.

    The hash shows that the text is whole, not that a sound writer has written it.
    """
    _check_count("step", manifest.step)
    for name, file in manifest.files.items():
        if Path(name).name != name or name in ("", "..") or "\0" in name:
            raise ValueError(f"{name!r} is no name of a file in the folder")
        _check_count(f"the bytes of {name}", file["bytes"])
        if not isinstance(file["sha256"], str):
            raise ValueError(f"the hash of {name} is no text")
    for name, tensor in manifest.tensors.items():
        for length in tensor["shape"]:
            _check_count(f"the shape of {name}", length)
        if tensor["file"] not in manifest.files:
            raise ValueError(f"{name} is in no file")
    texts = (*manifest.aliases.values(), *manifest.aliases)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("an alias is no name")
    by_name = ("optimizer", "extra_states", "schedulers")
    parts = (manifest.values.get(part, {}) for part in by_name)
    tables = (manifest.run, manifest.values, *parts)
    if not all(isinstance(table, dict) for table in tables):
        raise ValueError("run, values, or a part of the values is no table")


def _check_count(what: str, number: object) -> None:
    if type(number) is not int or not 0 <= number < 2**63:
        raise ValueError(f"{what} is {number!r:.40}, no whole number from 0 on")


def damaged(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Say of each file that is not what was written how it differs."""
    problems = []
    for name in names:
        expected, path = manifest.files[name], folder / name
        try:
            status = path.stat()
            size = status.st_size
            if not stat.S_ISREG(status.st_mode):
                problems.append(f"{path} is no file")
            elif size != expected["bytes"]:
                problems.append(f"{path} has {size:,} bytes, not {expected['bytes']:,}")
            elif sha256_of(path) != expected["sha256"]:
                problems.append(f"{path} does not have the hash in the manifest")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
    return problems


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
