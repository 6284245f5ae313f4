"""A folder of checkpoints belongs to one run at a time.

The lock is the operating system's, on the folder itself: it ends with its process,
however that ends, and leaves no file. Where a file system has no locks, there is none.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zbpp.checkpoint.manifest import CheckpointError

__all__ = ["locked"]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if it is not there.

    Raises:
        CheckpointError: another process holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = os.open(folder, os.O_RDONLY) if sys.platform != "win32" else None
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        if held is not None and not _lock(held):
            raise CheckpointError(
                f"another run saves its checkpoints in {folder}; wait for its end, or "
                "give another folder"
            )
        yield
    finally:
        if held is not None:
            os.close(held)


def _lock(file: int) -> bool:
    """Lock an open file; False if another process has done so."""
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here, on a network's file system for instance
        return True
    return True
