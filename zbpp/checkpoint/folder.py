"""A folder of checkpoints: which are there, which is the newest, which may go.

    run/
        step-00000010/                a checkpoint: it has a manifest
        step-00000020/
        .partial-step-00000030-3f.../ being written, or left by a process that died
        .old-step-00000020-77.../     one that a new one of the same step replaces
        .gone-step-00000005-a0.../    being removed

There is no file that names the latest one: it could be torn, or name what is gone.
"""

import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from zbpp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    damaged,
    read_manifest,
    sync_folder,
)

__all__ = [
    "begin",
    "candidates",
    "is_checkpoint",
    "last_step",
    "newest",
    "open_checkpoint",
    "publish",
]

_PARTIAL, _OLD, _GONE = ".partial-", ".old-", ".gone-"


def is_checkpoint(path: Path) -> bool:
    """True for a checkpoint, also a damaged one; a folder of several is none."""
    return (path / MANIFEST).exists() or path.name.startswith("step-")


def candidates(path: str | Path) -> list[Path]:
    """The checkpoint itself, or those in a folder, newest first, whatever their state.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if is_checkpoint(path) and path.is_dir():
        return [path]
    found = [(_step_of(one), one) for one in _folders(path)]
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {path}; give the folder that `save` was given, "
            "or one of its step-... folders"
        )
    return [one for _, one in sorted(found, reverse=True)]


def newest(path: str | Path) -> Path | None:
    """The newest checkpoint whose files are all as they were written, or None."""
    try:
        found = candidates(path)
    except CheckpointError:
        return None
    for one in found:
        try:
            open_checkpoint(one)
        except CheckpointError:
            continue
        return one
    return None


def last_step(path: str | Path) -> int | None:
    """Step of the newest checkpoint that has a manifest; its files are not read."""
    try:
        steps = [_step_of(one) for one in candidates(path)]
    except CheckpointError:
        return None
    return max((step for step, is_there in steps if is_there), default=None)


def open_checkpoint(path: Path) -> Manifest:
    """Read the manifest of one checkpoint and verify all of its files.

    Raises:
        CheckpointError: names what is damaged.
    """
    manifest = read_manifest(path)
    wrong = damaged(path, manifest, manifest.files)
    if wrong:
        raise CheckpointError(f"the checkpoint is damaged: {'; '.join(wrong)}")
    return manifest


def _folders(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for one in path.iterdir():
            named = one.name.startswith("step-") or _is_last_of_its_step(one)
            if named and one.is_dir():
                yield one


def _is_last_of_its_step(path: Path) -> bool:
    """True for a replaced checkpoint if the new one has not got its name."""
    return path.name.startswith(_OLD) and not _name_before(path).exists()


def _name_before(path: Path) -> Path:
    name = path.name.removeprefix(_OLD).rpartition("-")[0]
    return path.with_name(name)


def _step_of(path: Path) -> tuple[int, int]:
    """For the order; a damaged manifest leaves the name to go by."""
    try:
        return read_manifest(path).step, 1
    except CheckpointError:
        digits = path.name.rpartition("step-")[2]
        return (int(digits) if digits.isdecimal() else -1), 0


def begin(folder: Path, step: int) -> Path:
    """Make an empty folder to write a checkpoint into; clear what dead ones left.

    Raises:
        OSError: it cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for one in list(folder.iterdir()):
        if _is_last_of_its_step(one):
            one.rename(_name_before(one))
        elif one.name.startswith((_PARTIAL, _OLD, _GONE)):
            shutil.rmtree(one, ignore_errors=True)
    partial = folder / f"{_PARTIAL}step-{step:08}-{secrets.token_hex(4)}"
    partial.mkdir()
    return partial


def publish(partial: Path, *, step: int, keep: int | None) -> Path:
    """Give a finished checkpoint its name, at once and for good; remove old ones.

    Args:
        partial: complete, with its manifest, and on the disk.
        step: of it.
        keep: checkpoints that stay, this one and the newest others; None: all.

    Raises:
        OSError: it cannot be renamed.
    """
    folder = partial.parent
    final = folder / f"step-{step:08}"
    if final.exists():
        final.rename(folder / f"{_OLD}{final.name}-{secrets.token_hex(4)}")
    partial.rename(final)
    sync_folder(folder)
    if keep is not None:
        others = [one for one in candidates(folder) if one != final]
        valid = [one for one in others if _step_of(one)[1]]
        for one in valid[keep - 1 :]:
            one.rename(folder / f"{_GONE}{one.name}-{secrets.token_hex(4)}")
    for one in folder.iterdir():
        if one.name.startswith((_OLD, _GONE)):
            shutil.rmtree(one, ignore_errors=True)
    return final
