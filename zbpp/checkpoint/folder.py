"""A folder of checkpoints: which is the newest whole one, which may go, whose it is.

    run/
        step-00000010/                a checkpoint: it has a manifest
        step-00000020/
        step-00000020.1/              a later one of the same step, which replaces it
        .partial-step-00000030-3f.../ being written or removed, also by a dead process

There is no file that names the latest one: it could be torn, or name a deleted one.
"""

import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zbpp.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    Manifest,
    damaged,
    read_manifest,
    sync_folder,
)

Gather = Callable[[Any], list[Any]]
"""Gives every process of a pipeline the values of all, by rank."""

_PARTIAL = ".partial-"


def alone(value: Any) -> list[Any]:
    """The `Gather` of a single process."""
    return [value]


def open_newest(
    path: str | Path, *, rank: int = 0, gather: Gather = alone
) -> tuple[Path, Manifest, list[str]]:
    """Verify a checkpoint, or find the newest undamaged one (every rank must call).

    Each process hashes its share of the files, so each file is hashed once. The path is
    that of rank 0.

    Returns:
        The checkpoint, its manifest, and what is damaged in newer ones.

    Raises:
        CheckpointError: there is none, or names all that is damaged.
    """
    answers = gather(candidates(Path(path)))
    folders: list[Path] = answers[0]
    if not folders:
        raise CheckpointError(
            f"there is no checkpoint in {path}; give the folder of `save`, or one of "
            "its step-... folders"
        )
    passed_over: list[str] = []
    for folder in folders:
        manifest, problems = None, list[str]()
        try:
            manifest = read_manifest(folder)
            share = range(rank, len(manifest.files), len(answers))
            problems = damaged(folder, manifest, share)
        except CheckpointError as error:
            problems = [str(error)]
        texts = sorted({text for texts in gather(problems) for text in texts})
        if manifest is not None and not texts:
            return folder, manifest, passed_over
        passed_over += texts
    raise CheckpointError(f"no checkpoint can be loaded: {'; '.join(passed_over)}")


def newest(path: str | Path) -> Path | None:
    """The newest checkpoint whose files are all as they were written, or None."""
    try:
        return open_newest(path)[0]
    except CheckpointError:
        return None


def candidates(path: Path) -> list[Path]:
    """The checkpoint itself, or those in a folder, newest first, whatever their state.

    Empty if there is none.
    """
    is_checkpoint = (path / MANIFEST).exists() or path.name.startswith("step-")
    if path.is_dir() and is_checkpoint:
        return [path]
    children = path.iterdir() if path.is_dir() else ()
    named = {child: number for child in children if (number := _number(child))}
    return sorted(named, key=named.__getitem__, reverse=True)


def _number(path: Path) -> tuple[int, int] | None:
    """The step of a checkpoint, and how many of this step came before it."""
    match = re.fullmatch(r"step-(\d+)(?:\.(\d+))?", path.name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def make_partial(folder: Path, step: int) -> Path:
    """Make an empty folder for a checkpoint; clear leftovers of killed processes."""
    folder.mkdir(parents=True, exist_ok=True)
    _clear(folder)
    partial = folder / f"{_PARTIAL}step-{step:08}-{secrets.token_hex(4)}"
    partial.mkdir()
    return partial


def publish(partial: Path, step: int, *, keep: int | None) -> None:
    """Give a finished checkpoint its name, at once and for good; remove old ones.

    ``partial`` is complete and on the disk. ``keep`` checkpoints stay: this one and the
    newest others; None: all but those of the same step, of a run that restarted.
    """
    folder, final = partial.parent, partial.with_name(f"step-{step:08}")
    others = {path: _number(path) or (0, 0) for path in candidates(folder)}
    replaced = [path for path, (its_step, _) in others.items() if its_step == step]
    if replaced:
        final = final.with_suffix(f".{others[replaced[0]][1] + 1}")
    partial.rename(final)
    sync_folder(folder)
    whole = [x for x in others if x not in replaced and (x / MANIFEST).exists()]
    for path in [*replaced, *(whole[keep - 1 :] if keep is not None else ())]:
        path.rename(path.with_name(f"{_PARTIAL}{path.name}-{secrets.token_hex(4)}"))
    _clear(folder)


def _clear(folder: Path) -> None:
    for path in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for one run; it is made if it is not there.

    The lock is the operating system's, on the folder itself: it ends with its process,
    however that ends, and leaves no file. A file system without locks ignores it.

    Raises:
        CheckpointError: another process has locked it, or it cannot be made.
    """
    import fcntl  # Windows has none

    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                f"another run saves its checkpoints in {folder}; wait for its end, or "
                "give another folder"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
