"""Byte-level text for language modelling: a token is a byte, so there are 256.

By default the text is the Python standard library's own source, read where it is
installed: every machine that runs zbpp has it, and nothing is downloaded. It differs
between Python versions, so loss curves are comparable only when the hash agrees.

What a batch holds depends on the seed and the step alone, never on which process
asks: the first and the last stage read the same batch without exchanging it.
"""

import hashlib
import os
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from zbpp.core import RequestError

__all__ = ["Batch", "Corpus", "is_held_out", "load_corpus"]

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Inputs and targets, both (windows, seq); a target is the byte after its input."""

_HELD_OUT = 0.05  # share of the files (of the bytes, if there is one file)
_END_OF_FILE = b"\0"  # between two files; source text has no such byte
_NOT_LIBRARY = frozenset(
    # tests, installed packages, and prose generated into one huge string
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data")
)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation text, both 1-D arrays of bytes.

    ``sha256`` covers the whole text in file order, before anything is held out.
    """

    name: str
    n_files: int
    sha256: str
    training: NDArray[np.uint8]
    validation: NDArray[np.uint8]

    def describe(self) -> str:
        """One line that identifies the text, for the log."""
        n_bytes = len(self.training) + len(self.validation)
        return (
            f"data: {self.name}: {self.n_files:,} files, {n_bytes:,} bytes "
            f"({len(self.validation):,} held out), sha256 {self.sha256}, "
            f"Python {platform.python_version()}"
        )

    def training_batch(self, *, seed: int, step: int, windows: int, seq: int) -> Batch:
        """Windows at random places of the training text, drawn from (seed, step)."""
        places = np.random.default_rng([seed, step]).integers(
            len(self.training) - seq, size=windows
        )
        return _windows(self.training, places, seq)

    def validation_batch(self, *, windows: int, seq: int) -> Batch:
        """Windows at even distances over the validation text: always the same."""
        places = np.linspace(0, len(self.validation) - seq - 1, num=windows)
        return _windows(self.validation, places.astype(np.int64), seq)


def load_corpus(path: str | Path | None = None, *, seq: int) -> Corpus:
    """Read a text file, all files of a folder, or (None) the standard library.

    About one file in twenty is held out for validation, chosen by its name; of a
    single file, and where the names choose none or all, the last twentieth.

    Args:
        path: the text; hidden files and folders are passed over.
        seq: both parts must hold at least one window of this many bytes.

    Raises:
        RequestError: nothing is there, or the text is too short.
    """
    if path is None:
        root, name = Path(sysconfig.get_path("stdlib")), "Python standard library"
        files = [file for file in _files(root, _NOT_LIBRARY) if _is_source(file)]
        advice = "this Python has no library source to read; give --data PATH"
    else:
        root, name = Path(path), str(path)
        files = _files(root)
        advice = "give --data a text file, or a folder with some"
    texts = {file: (root / file).read_bytes() for file in files}
    texts = {file: text for file, text in texts.items() if text}
    if not texts:
        state = "holds no text" if root.exists() else "does not exist"
        raise RequestError(f"{root} {state}; {advice}")
    training, validation = _divide(texts)
    for part, text in (("training", training), ("validation", validation)):
        if len(text) <= seq:
            raise RequestError(
                f"{name} leaves {len(text)} bytes for {part}; --seq {seq} needs at "
                f"least {seq + 1}: give more text or a smaller --seq"
            )
    return Corpus(
        name=name,
        n_files=len(texts),
        sha256=hashlib.sha256(_END_OF_FILE.join(texts.values())).hexdigest(),
        training=training,
        validation=validation,
    )


def is_held_out(file: str) -> bool:
    """True if a file is for validation, by its path below the folder, with ``/``.

    Adding or removing other files changes nothing: no text ever changes sides.
    """
    digest = hashlib.sha256(file.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < _HELD_OUT * 2**64


def _files(root: Path, skipped: frozenset[str] = frozenset()) -> list[str]:
    """Paths of the files below a folder, with ``/`` and sorted; ``.`` for a file."""
    if root.is_file():
        return ["."]
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in skipped and name != "__pycache__" and name[0] != "."
        ]
        files += [Path(folder, name) for name in names if name[0] != "."]
    return sorted(file.relative_to(root).as_posix() for file in files)


def _is_source(file: str) -> bool:
    """True for Python source, other than a record of how this Python was built."""
    name = file.rpartition("/")[2]
    return name.endswith(".py") and not name.startswith("_sysconfigdata")


def _divide(
    texts: dict[str, bytes],
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Training and validation text."""
    held_out = [text for file, text in texts.items() if is_held_out(file)]
    kept = [text for file, text in texts.items() if not is_held_out(file)]
    if len(texts) > 1 and held_out and kept:
        return _joined(kept), _joined(held_out)
    whole = _joined(list(texts.values()))
    n_kept = len(whole) - int(len(whole) * _HELD_OUT)
    return whole[:n_kept], whole[n_kept:]


def _joined(texts: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(_END_OF_FILE.join(texts), dtype=np.uint8)


def _windows(text: NDArray[np.uint8], places: NDArray[np.int64], seq: int) -> Batch:
    tokens = text[places[:, None] + np.arange(seq + 1)].astype(np.int64)
    return tokens[:, :-1], tokens[:, 1:]
