"""Save in the background: the run goes on while the files are written.

    caller           copy to host memory | next steps ...
    thread           | write, read back, leave a manifest of this part
    rank 0's thread  |   all parts there: manifest, rename, remove old ones

The processes of a pipeline meet in the file system only, so a save that fails or hangs
holds up nobody but itself, and until the rename there is no new checkpoint.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from zbpp.checkpoint.folder import Gather, make_partial, publish
from zbpp.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    Manifest,
    read_manifest,
    sha256_of,
    write_durably,
)
from zbpp.checkpoint.optimizers import schedulers_differ
from zbpp.checkpoint.tensors import HostCopies, write_tensors
from zbpp.core import RequestError

__all__ = ["Put", "Saver"]

Put = Callable[[str, Tensor], None]
"""Takes a tensor by its name in the checkpoint, and has copied it on return."""

Failure = tuple[float, str]
"""When a process failed, and why."""

_PART = "part-{}.json"
_POLL_S = 0.01
_PATIENCE_S = 600.0  # for the parts of the other processes
_PATIENCE_AT_EXIT_S = 10.0  # the same when the script has ended


class Saver:
    """Saves of one process of a pipeline, one after the other.

    Args:
        rank: of this process.
        gather: gives every process the values of all.
    """

    def __init__(self, rank: int, gather: Gather) -> None:
        self._rank, self._gather = rank, gather
        self._copies = HostCopies()
        self._writing: Future[Failure | None] | None = None

    @property
    def is_saving(self) -> bool:
        """True from `begin` until the end of the save is reported."""
        return self._writing is not None

    def begin(
        self, folder: Path, take: Callable[[Put], Manifest], *, keep: int | None
    ) -> str | None:
        """Copy a state and start to write it; every process must call.

        Args:
            folder: of the checkpoints; all processes see the same.
            take: gives the manifest of the part that this process holds, without files,
                and every tensor to what it is called with.
            keep: see `publish`.

        Returns:
            Why the save before has failed, None if it has not.

        Raises:
            CheckpointError: the state cannot be saved, the folder cannot be written, or
                folder, step or keep differ among processes.
        """
        earlier = self._wait()
        partial, problem, part = "", None, Manifest(0, {})
        self._copies.begin()
        try:
            part = take(self._copies.take)
            if self._rank == 0:
                partial = str(make_partial(folder, part.step))
        except RequestError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write to {folder}: {error.strerror}"
        tensors = self._copies.finish()
        request = (str(folder.absolute()), part.step, keep)
        schedulers = part.values.get("schedulers", {})
        answers = self._gather((request, partial, problem, earlier, schedulers))
        seen: dict[str, Any] = {}
        for _, _, text, _, states in answers:
            if text is not None:
                raise CheckpointError(text)
            for name, state in states.items():
                if seen.setdefault(name, state) != state:
                    raise CheckpointError(schedulers_differ(name))
        requests = [answer[0] for answer in answers]
        differing = [r for r, asked in enumerate(requests) if asked != requests[0]]
        if differing:
            raise CheckpointError(
                f"rank(s) {differing} save {requests[differing[0]]}, rank 0 saves "
                f"{requests[0]}: folder, step and keep must be the same"
            )
        writer = _Writer(
            Path(answers[0][1]), part, tensors, self._rank, len(answers), keep
        )
        executor = ThreadPoolExecutor(1, thread_name_prefix="zbpp save")
        self._writing = executor.submit(writer.run)
        executor.shutdown(wait=False)  # the thread ends with its work
        return _first_cause(answer[3] for answer in answers)

    def finish(self) -> str | None:
        """Wait for the last save; every process must call.

        Returns:
            Why it has failed, None if it is there, or there was none.
        """
        return _first_cause(self._gather(self._wait()))

    def _wait(self) -> Failure | None:
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None


def _first_cause(failures: Iterable[Failure | None]) -> str | None:
    """The first failure of all ranks; later ones may follow from it."""
    by_time = [(failed, rank) for rank, failed in enumerate(failures) if failed]
    if not by_time:
        return None
    (_, text), rank = min(by_time)
    return f"rank {rank}: {text}"


@dataclass
class _Writer:
    """One save of one process."""

    partial: Path
    part: Manifest
    tensors: Mapping[str, Tensor]
    rank: int
    n_ranks: int
    keep: int | None

    def run(self) -> Failure | None:
        """Write; rank 0 then waits for the others and publishes."""
        try:
            self._write_part()
            if self.rank == 0:
                self._publish(self._wait_for_parts())
        except Exception as error:
            is_expected = isinstance(error, OSError | ValueError)
            text = str(error) if is_expected else f"{type(error).__name__}: {error}"
            failure = time.time(), text
            marker = self.partial / f"failed-{self.rank}"
            with suppress(OSError):
                try:
                    write_durably(marker, text)
                except OSError:  # a full disk still takes a name
                    marker.touch()
            if self.rank == 0:
                shutil.rmtree(self.partial, ignore_errors=True)
            return failure
        return None

    def _write_part(self) -> None:
        path = self.partial / f"stage-{self.rank}.safetensors"
        index = write_tensors(path, self.tensors)
        about = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
        part = replace(self.part, files={path.name: about}, tensors=index)
        write_durably(self.partial / _PART.format(self.rank), part.text())

    def _wait_for_parts(self) -> list[Manifest]:
        """Wait for the manifests that all processes have written, by rank."""
        parts: dict[int, Manifest] = {}
        deadline = time.monotonic() + _PATIENCE_S
        while missing := sorted(set(range(self.n_ranks)) - parts.keys()):
            for rank in missing:
                name = _PART.format(rank)
                if (self.partial / name).exists():
                    parts[rank] = read_manifest(self.partial, name)
                elif (marker := self.partial / f"failed-{rank}").exists():
                    raise CheckpointError(f"rank {rank} failed: {marker.read_text()}")
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + _PATIENCE_AT_EXIT_S)
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank(s) {missing} have not written to {self.partial} within "
                    f"{_PATIENCE_S:g} s; is it one folder for all processes?"
                )
            time.sleep(_POLL_S)
        return [parts[rank] for rank in range(self.n_ranks)]

    def _publish(self, parts: list[Manifest]) -> None:
        """Join the parts: tables and lists of all stages, and all else of rank 0."""
        tables: dict[str, Any] = {"files": {}, "tensors": {}, "aliases": {}}
        values: dict[str, Any] = {}
        for part in parts:
            for name, table in tables.items():
                table |= getattr(part, name)
            for name, value in part.values.items():
                if name in ("optimizer", "extra_states", "schedulers"):
                    values.setdefault(name, {}).update(value)
                else:
                    values.setdefault(name, value)
        manifest = replace(self.part, **tables, values=values)
        write_durably(self.partial / MANIFEST, manifest.text())
        for path in self.partial.glob(_PART.format("*")):
            path.unlink()
        publish(self.partial, step=self.part.step, keep=self.keep)
