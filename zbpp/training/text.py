"""Byte-level text for language modelling: a token is a byte, so there are 256.

By default the text is the Python standard library's source, read where it is
installed: every machine that runs zbpp has it, and nothing is downloaded. It differs
between Python versions, so loss curves are comparable only when the hash agrees.
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

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Inputs and targets, both (windows, seq); a target is the byte after its input."""

_HELD_OUT = 0.05  # share of the files (of the bytes, if there is one file)
_END_OF_FILE = b"\0"  # between two files; source text has no such byte
_NOT_LIBRARY = frozenset(
    # tests, installed packages, and prose generated into one huge string
    ("test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data")
) | {"__pycache__"}
_RECORD = "_sysconfigdata"


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and validation text, both 1-D arrays of bytes.

    ``line`` identifies it in a log, by ``sha256`` among others.
    """

    line: str
    sha256: str
    training: NDArray[np.uint8]
    validation: NDArray[np.uint8]

    def training_batch(self, *, seed: int, step: int, windows: int, seq: int) -> Batch:
        """Windows at random places of the training text, drawn from (seed, step)."""
        generator = np.random.default_rng([seed, step])
        places = generator.integers(len(self.training) - seq, size=windows)
        return _windows(self.training, places, seq)

    def validation_batch(self, *, windows: int, seq: int) -> Batch:
        """Windows at even distances over the validation text: always the same."""
        places = np.linspace(0, len(self.validation) - seq - 1, num=windows)
        return _windows(self.validation, places.astype(np.int64), seq)


def load_corpus(path: Path | None = None, *, seq: int) -> Corpus:
    """Read a text file, all files of a folder, or (None) the standard library.

    About one file in twenty is for validation only, chosen by its name; where the
    names choose none or all, as with a single file, the last twentieth of the text.

    Args:
        path: the text; hidden files and folders are passed over.
        seq: both parts need at least one window of this many bytes.

    Raises:
        RequestError: nothing is there, or the text is too short.
    """
    root = path or Path(sysconfig.get_path("stdlib"))
    name = "Python standard library" if path is None else str(path)
    contents = {x: (root / x).read_bytes() for x in _files(root, path is None)}
    texts = {file: content for file, content in contents.items() if content}
    if not texts:
        state = "contains no text" if root.exists() else "does not exist"
        raise RequestError(f"{root} {state}; give --data a text file, or a folder")
    whole = _END_OF_FILE.join(texts.values())
    held_out = {file for file in texts if _is_held_out(file)}
    training = _END_OF_FILE.join(texts[x] for x in texts if x not in held_out)
    validation = _END_OF_FILE.join(texts[x] for x in texts if x in held_out)
    if not training or not validation:
        n_training = len(whole) - int(len(whole) * _HELD_OUT)
        training, validation = whole[:n_training], whole[n_training:]
    for part, text in (("training", training), ("validation", validation)):
        if len(text) <= seq:
            raise RequestError(
                f"{name} leaves {len(text)} bytes for {part}; --seq {seq} needs at "
                f"least {seq + 1}: give more text or a smaller --seq"
            )
    sha256 = hashlib.sha256(whole).hexdigest()
    n_bytes = len(training) + len(validation)
    line = (
        f"data: {name}: {len(texts):,} files, {n_bytes:,} bytes "
        f"({len(validation):,} for validation), sha256 {sha256}, "
        f"Python {platform.python_version()}"
    )
    parts = (np.frombuffer(text, dtype=np.uint8) for text in (training, validation))
    return Corpus(line, sha256, *parts)


def _is_held_out(file: str) -> bool:
    """True if a file is for validation, by its path alone: no text changes sides."""
    digest = hashlib.sha256(file.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < _HELD_OUT * 2**64


def _files(root: Path, is_library: bool) -> list[str]:
    """Paths of the files below a folder, with ``/`` and sorted; ``.`` for a file."""
    if root.is_file():
        return ["."]
    skipped = _NOT_LIBRARY if is_library else {"__pycache__"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [x for x in folders if x[0] != "." and x not in skipped]
        files += [Path(folder, name) for name in names if name[0] != "."]
    if is_library:  # and no record of how this Python was built
        files = [x for x in files if x.suffix == ".py" and _RECORD not in x.name]
    return sorted(file.relative_to(root).as_posix() for file in files)


def _windows(text: NDArray[np.uint8], places: NDArray[np.int64], seq: int) -> Batch:
    tokens = text[places[:, None] + np.arange(seq + 1)].astype(np.int64)
    return tokens[:, :-1], tokens[:, 1:]
