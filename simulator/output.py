"""Files that the simulator, and commands, write."""

from pathlib import Path

from zbpp.core import RequestError

__all__ = ["write_file"]


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file; text as UTF-8.

    Raises:
        RequestError: it cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise RequestError(f"{path}: cannot be written: {error.strerror}") from None
