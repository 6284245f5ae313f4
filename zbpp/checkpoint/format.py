"""The files of a checkpoint: shards of tensors, and a manifest with their hashes.

    step-00000012/
        manifest.json         JSON with a hash of itself, written last
        rank-0.safetensors    shards of process 0
        ...

Each shard has its offset in the whole tensor, in the form of torch's
`HuggingFaceStorageReader`: it reads any part of any tensor, for a plain tensor or for
a DTensor on any mesh. A folder without a manifest is no checkpoint. The manifest
contains no names of files, and nothing is ever unpickled or executed.
"""

import hashlib
import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from zbpp.core import RequestError
from zbpp.runtime.support.sharded import is_sharded

MANIFEST = "manifest.json"
_SHARDS = "rank-{}.safetensors"
_FORMAT, _VERSION = "zbpp-checkpoint", 3
_MAX_BYTES = 2**29
"""Of a manifest: a million tensors take half of it."""

_NOT_AS_WRITTEN = (AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""The errors of reading a damaged manifest."""


class CheckpointError(RequestError):
    """A checkpoint is damaged or not there, or could not be written."""


# ---- The manifest.


class FileHash(NamedTuple):
    """Size and hash of the shards of one process."""

    n_bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint, or of one process's part, without its tensors.

    ``run`` is for people: mode, stages, micro-batches and split. ``files`` are by rank,
    None for a process without shards. ``aliases`` are other names of tied tensors,
    ``values`` the rest of the state, as `encode` writes it.
    """

    step: int
    run: Mapping[str, Any]
    files: Sequence[FileHash | None] = ()
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
        # a pipe has 0 bytes and would be waited for; a sparse file has any size
        if not 0 < (n_bytes := path.stat().st_size) <= _MAX_BYTES:
            raise ValueError(f"it has {n_bytes:,} bytes")
        body = json.loads(path.read_bytes())
        sha256 = body.pop("sha256")
        kind, version = body["format"], body["version"]
        if (kind, version) != (_FORMAT, _VERSION):
            raise ValueError(
                f"it is a {kind} of version {version}, and this zbpp reads {_FORMAT} "
                f"of version {_VERSION}"
            )
        if sha256 != _digest(body):
            raise ValueError("it does not have the hash that it states")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (OSError, *_NOT_AS_WRITTEN) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    del body["format"], body["version"]
    body["files"] = [file and FileHash(*file) for file in body["files"]]
    return Manifest(**body)


def damaged(folder: Path, manifest: Manifest, ranks: Iterable[int]) -> list[str]:
    """Describe each damaged file of some ranks, and stray files."""
    expected = {_SHARDS.format(i) for i, x in enumerate(manifest.files) if x}
    strays = {path.name for path in folder.glob("*.safetensors")} - expected
    problems = [f"{folder / name} is not in the manifest" for name in sorted(strays)]
    for rank in ranks:
        path, file = folder / _SHARDS.format(rank), manifest.files[rank]
        if file is None:
            continue
        try:
            # a pipe has 0 bytes and would be waited for
            if (n_bytes := path.stat().st_size) != file.n_bytes:
                problems.append(f"{path} has {n_bytes:,} bytes, not {file.n_bytes:,}")
            elif _sha256_of(path) != file.sha256:
                problems.append(f"{path} does not have the hash in the manifest")
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
    return problems


def _digest(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _sha256_of(path: Path) -> str:
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


# ---- Values.

# JSON's types stay as they are. Everything else is an object with one key:
#
#     {"tuple": [...]}   {"dict": [[key, value], ...]}   {"counter": ...}
#     {"float": "inf"}   {"tensor": "optimizer/0.weight/0/exp_avg"}


def encode(value: Any, where: str, put: Callable[[str, Tensor], None]) -> Any:
    """Convert numbers, texts, tensors and containers of them to JSON values.

    ``put`` takes each tensor, with a name that begins with ``where``.

    >>> encode({"lr": 0.1, "betas": (0.9, 0.99)}, "group", print)
    {'dict': [['lr', 0.1], ['betas', {'tuple': [0.9, 0.99]}]]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        put(where, value)
        return {"tensor": where}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}/{i}", put) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        rows = [
            [encode(key, f"{where}/key", put), encode(item, f"{where}/{key}", put)]
            for key, item in value.items()
        ]
        return {kind: rows}
    raise RequestError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot store; it "
        "stores numbers, texts, tensors, and lists, tuples and dicts of them"
    )


_KINDS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "counter": lambda rows: Counter(dict(rows)),
    "float": float,
}


def decode(value: Any, get: Callable[[str], Tensor]) -> Any:
    """The inverse of `encode`; ``get`` returns the tensor of a name."""
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return get(content) if kind == "tensor" else _KINDS[kind](decode(content, get))


# ---- Tensors.


class Shard(NamedTuple):
    """Numbers of a tensor in this process, and where in the whole they begin."""

    numbers: Tensor
    offsets: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        """The same part of another whole tensor."""
        for dim, (start, length) in enumerate(
            zip(self.offsets, self.numbers.shape, strict=True)
        ):
            whole = whole.narrow(dim, start if length else 0, length)
        return whole


@torch.no_grad()
def shard_of(tensor: Tensor) -> Shard:
    """The shard of a DTensor in this process; all of a plain tensor."""
    if not is_sharded(tensor):
        return Shard(tensor.detach(), (0,) * tensor.dim())
    sharded = cast(Any, tensor.detach())
    (chunk,) = sharded.__create_chunk_list__()
    return Shard(sharded.to_local(), tuple(chunk.offsets))


def write_shards(
    folder: Path, rank: int, shards: Mapping[str, Shard]
) -> FileHash | None:
    """Write the shards of a process, in separate memory; wait for the disk."""
    if not shards:
        return None
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = folder / _SHARDS.format(rank)
    offsets = {name: {"saved_offsets": shard.offsets} for name, shard in shards.items()}
    try:
        save_file(
            {name: shard.numbers for name, shard in shards.items()},
            path,
            {"DCP_SHARDING_INFO": json.dumps(offsets)},
        )
        # the package makes files that only their owner may read
        path.chmod(folder.stat().st_mode & 0o666)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except SafetensorError as error:
        path.unlink(missing_ok=True)  # so that a full disk takes the reason
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    except KeyError as error:  # the package's way to refuse a dtype
        raise CheckpointError(f"safetensors files store no {error.args[0]}") from error
    return FileHash(path.stat().st_size, _sha256_of(path))


class SavedTensors:
    """The tensors in the verified folder of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with self._failures():
            from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

            reader: Any = HuggingFaceStorageReader(str(folder))
            metadata = reader.read_metadata()
        # each `load` asks for it, and would open all files again
        reader.read_metadata = lambda: metadata
        self._reader = reader
        self.like: dict[str, Tensor] = {
            name: torch.empty(x.size, dtype=x.properties.dtype, device="meta")
            for name, x in metadata.state_dict_metadata.items()
        }
        """Of the shape and dtype of each tensor, by its name, without numbers."""
        self._name_of = {like: name for name, like in self.like.items()}

    @torch.no_grad()
    def read(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Fill tensors, plain or DTensors on any mesh; each comes after its `like`."""
        from torch.distributed.checkpoint.state_dict_loader import load

        rest = [(self._name_of[like], target) for like, target in pairs]
        while rest:  # several places may have one saved tensor
            targets: dict[str, Any] = dict(rest)
            rest = [(name, x) for name, x in rest if targets[name] is not x]
            with self._failures():
                load(targets, storage_reader=self._reader, no_dist=True)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        from safetensors import SafetensorError
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it reads without processes
                yield
        except (CheckpointException, OSError, SafetensorError) as error:
            cause = str(error).strip().splitlines()[-1]  # before it come tracebacks
            raise CheckpointError(f"{self._folder} cannot be read: {cause}") from error
