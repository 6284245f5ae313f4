"""Save in the background: the run goes on while the files are written.

    caller   copy to host memory | next steps ...
    thread                       | write, read back, tell in a part file
    rank 0's thread              |   all parts there: manifest, rename, remove old ones

The processes of a pipeline meet in the file system only, so a save that fails or hangs
holds up nobody but itself, and until the rename there is no new checkpoint.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from zbpp.checkpoint.folder import begin, publish
from zbpp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    sha256_of,
    write_durably,
)
from zbpp.checkpoint.staging import Staging

__all__ = ["Saver", "Saving", "Snapshot"]

Failure = tuple[float, str]
"""Its time, and words about it."""

_POLL_S = 0.01
_PATIENCE_S = 600.0  # for the other processes' parts
_LAST_S = 10.0  # the same when the script has ended


@dataclass
class Snapshot:
    """A state to be saved, or the part of it that a process holds.

    Args:
        step: steps done.
        tensors: by their names in the checkpoint.
        values: the rest, encoded.
        aliases: other names of tied tensors.
        run: see `Manifest`.
    """

    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)


class Saving:
    """A save that is under way."""

    def __init__(self, write: Callable[[], None]) -> None:
        self._write = write
        self.error: Failure | None = None
        """Of this process."""
        self.seconds = 0.0
        """From the start to the end of the writing."""
        self._thread = threading.Thread(target=self._run, name="zbpp save")
        self._thread.start()

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            self._write()
        except (OSError, ValueError, CheckpointError) as error:
            self.error = time.time(), str(error)
        except BaseException as error:
            self.error = time.time(), f"{type(error).__name__}: {error}"
            raise
        finally:
            self.seconds = time.perf_counter() - started

    def done(self) -> bool:
        """True if this process has nothing left to write."""
        return not self._thread.is_alive()

    def join(self) -> Failure | None:
        """Wait for this process; gives `error`."""
        self._thread.join()
        return self.error


class Saver:
    """Saves of one process of a pipeline, one after the other.

    Args:
        rank: of this process.
        gather: gives every process the things of all.
    """

    def __init__(self, rank: int, gather: Callable[[Any], list[Any]]) -> None:
        self._rank, self._gather = rank, gather
        self._staging = Staging()
        self._saving: Saving | None = None

    @property
    def saving(self) -> Saving | None:
        """The last save, if nobody has heard of its end yet."""
        return self._saving

    def begin(
        self, folder: Path, snapshot: Snapshot | str, *, keep: int | None
    ) -> str | None:
        """Copy a state and start to write it; every process must call.

        Args:
            folder: of the checkpoints; all processes see the same.
            snapshot: of the part that this process holds, or why there is none.
            keep: see `publish`.

        Returns:
            Words about a failure of the save before, None if there was none.

        Raises:
            CheckpointError: the folder cannot be written, or differs among processes.
        """
        before = self._saving.join() if self._saving is not None else None
        self._saving = None
        partial = ""
        problem: str | None = None
        if isinstance(snapshot, str):
            problem, snapshot = snapshot, Snapshot(0, {}, {})
        elif self._rank == 0:
            try:
                partial = str(begin(folder, snapshot.step))
            except OSError as error:
                problem = f"cannot write to {folder}: {error.strerror}"
        tensors = self._staging.copy(snapshot.tensors)
        asked = (str(folder.absolute()), snapshot.step, keep)
        answers = self._gather((asked, partial, problem, before))
        for _, _, words, _ in answers:
            if words is not None:
                raise CheckpointError(words)
        other = [r for r, answer in enumerate(answers) if answer[0] != answers[0][0]]
        if other:
            raise CheckpointError(
                f"rank(s) {other} save {answers[other[0]][0]}, rank 0 saves "
                f"{answers[0][0]}: folder, step and keep must be the same"
            )
        writer = _Writer(
            Path(answers[0][1]), snapshot, tensors, self._rank, len(answers), keep
        )
        self._saving = Saving(writer.run)
        return _cause(answer[3] for answer in answers)

    def finish(self) -> str | None:
        """Wait for the last save; every process must call.

        Returns:
            Words about its failure, None if it is there, or there was none.
        """
        mine = self._saving.join() if self._saving is not None else None
        self._saving = None
        return _cause(self._gather(mine))


def _cause(failures: Iterable[Failure | None]) -> str | None:
    """The first failure of all ranks; the others may follow from it."""
    found = [(one, rank) for rank, one in enumerate(failures) if one is not None]
    if not found:
        return None
    (_, words), rank = min(found)
    return f"rank {rank}: {words}"


@dataclass
class _Writer:
    """One save of one process."""

    partial: Path
    snapshot: Snapshot
    tensors: Mapping[str, Tensor]
    rank: int
    n_ranks: int
    keep: int | None

    def run(self) -> None:
        """Write; rank 0 then waits for the others and publishes."""
        try:
            self._write_part()
            if self.rank == 0:
                self._publish(self._parts())
        except BaseException as error:
            failed = self.partial / f"failed-{self.rank}"
            with suppress(OSError):
                try:
                    write_durably(failed, str(error))
                except OSError:  # a full disk still takes a name
                    failed.touch()
            if self.rank == 0:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _write_part(self) -> None:
        from zbpp.checkpoint.storage import write_tensors

        path = self.partial / f"stage-{self.rank}.safetensors"
        writer = write_tensors(path, self.tensors)
        if sha256_of(path) != writer.sha256:
            raise CheckpointError(f"{path} does not hold what was written to it")
        part = {
            "files": {path.name: {"bytes": writer.bytes, "sha256": writer.sha256}},
            "tensors": writer.index,
            "values": self.snapshot.values,
            "aliases": self.snapshot.aliases,
        }
        write_durably(self.partial / f"part-{self.rank}.json", json.dumps(part))

    def _parts(self) -> list[dict[str, Any]]:
        """Answers of all processes, once they have told."""
        parts: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + _PATIENCE_S
        while len(parts) < self.n_ranks:
            for rank in set(range(self.n_ranks)) - parts.keys():
                path = self.partial / f"part-{rank}.json"
                if path.exists():
                    parts[rank] = json.loads(path.read_bytes())
                elif (failed := self.partial / f"failed-{rank}").exists():
                    raise CheckpointError(f"rank {rank} failed: {failed.read_text()}")
            if len(parts) < self.n_ranks:
                if not threading.main_thread().is_alive():
                    deadline = min(deadline, time.monotonic() + _LAST_S)
                if time.monotonic() > deadline:
                    late = sorted(set(range(self.n_ranks)) - parts.keys())
                    raise CheckpointError(
                        f"rank(s) {late} have not written to {self.partial} within "
                        f"{_PATIENCE_S:g} s; is it one folder for all processes?"
                    )
                time.sleep(_POLL_S)
        return [parts[rank] for rank in range(self.n_ranks)]

    def _publish(self, parts: list[dict[str, Any]]) -> None:
        merged: dict[str, dict[str, Any]] = {"files": {}, "tensors": {}, "aliases": {}}
        for part in parts:
            for what, held in merged.items():
                held |= part[what]
        values = merge_values([part["values"] for part in parts])
        manifest = Manifest(
            self.snapshot.step, dict(self.snapshot.run), **merged, values=values
        )
        write_durably(self.partial / MANIFEST, manifest.text())
        for path in self.partial.glob("part-*.json"):
            path.unlink()
        publish(self.partial, step=self.snapshot.step, keep=self.keep)


def merge_values(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The values of all processes: tables are joined, lists too, all else is alike."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name == "optimizer":
                merged.setdefault(name, {}).update(value)
            elif name == "schedulers":
                merged.setdefault(name, []).extend(value)
            else:
                merged.setdefault(name, value)
    return merged
