"""Choose and verify the checkpoint that all processes of a pipeline load."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zbpp.checkpoint.folder import candidates
from zbpp.checkpoint.manifest import (
    CheckpointError,
    Manifest,
    damaged,
    read_manifest,
)

__all__ = ["open_together"]

Gather = Callable[[Any], list[Any]]


def open_together(
    path: Path, *, rank: int, gather: Gather
) -> tuple[Path, Manifest, list[str]]:
    """Open a checkpoint, or the newest undamaged one in a folder; all must call.

    Each process hashes its share of the files, so each file is hashed once.

    Args:
        path: as rank 0 sees it.
        rank: of this process.
        gather: gives every process the things of all.

    Returns:
        The checkpoint, its manifest, and words about damaged ones that are newer.

    Raises:
        CheckpointError: there is none, or names all that is damaged.
    """
    try:
        found: list[Path] | str = candidates(path)
    except CheckpointError as error:
        found = str(error)
    found = gather(found)[0]
    if isinstance(found, str):
        raise CheckpointError(found)
    passed: list[str] = []
    for one in found:
        manifest, wrong = _verify(one, rank, gather)
        if manifest is not None and not wrong:
            return one, manifest, passed
        passed += wrong
    raise CheckpointError(f"no checkpoint can be loaded: {'; '.join(passed)}")


def _verify(
    folder: Path, rank: int, gather: Gather
) -> tuple[Manifest | None, list[str]]:
    """The manifest, and what is wrong by the findings of all processes."""
    manifest, wrong = None, list[str]()
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        wrong = [str(error)]
    answers = gather(wrong)
    if manifest is not None and not any(answers):
        mine = sorted(manifest.files)[rank :: len(answers)]
        answers = gather(damaged(folder, manifest, mine))
    return manifest, sorted({text for its in answers for text in its})
