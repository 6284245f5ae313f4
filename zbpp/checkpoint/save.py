"""Save in the background: the run goes on while the files are written.

    caller           copy to host memory | next steps ...
    thread           | write, leave a manifest of this part
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

import torch

from zbpp.checkpoint.folder import Gather, make_partial, publish
from zbpp.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    Manifest,
    Shard,
    read_manifest,
    write_durably,
    write_shards,
)
from zbpp.checkpoint.optimizers import merge_schedulers
from zbpp.core import RequestError
from zbpp.runtime.support.devices import runs_ahead

__all__ = ["Put", "Saver"]

Put = Callable[[str, Shard], None]
"""Takes a shard by the name of its tensor, and has copied it on return."""

Failure = tuple[float, str]
"""When a process failed, and why."""

_PART = "part-{}.json"
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 1.0  # between two looks at the folder
_PATIENCE_S = 600.0  # for the parts of the other processes
_PATIENCE_AT_EXIT_S = 10.0  # the same when the script has ended


class _HostCopies:
    """Copies of shards in host memory, which is used again by the next save.

    A save blocks its caller for these copies only. Memory that was used before is
    written at several times the speed of fresh memory, whose pages are cleared one by
    one.
    """

    def __init__(self) -> None:
        self._before: dict[str, Shard] = {}
        self._copies: dict[str, Shard] = {}
        self._are_on_the_way = False

    def begin(self) -> None:
        """Start anew; the memory of the copies that were taken is used again."""
        self._before, self._copies = self._copies, {}

    def take(self, name: str, shard: Shard) -> None:
        """Copy a shard on any device, which may go at once."""
        tensor = shard.numbers
        is_async = runs_ahead(tensor.device)
        before = self._before.get(name)
        copy = None if before is None else before.numbers
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            copy = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=is_async
            )
        copy.copy_(tensor, non_blocking=is_async)
        self._copies[name] = Shard(copy, shard.offsets)
        self._are_on_the_way |= is_async

    def finish(self) -> dict[str, Shard]:
        """Wait for the copies, and give them by name; they are good until `begin`."""
        self._before = {}
        if self._are_on_the_way:
            torch.accelerator.synchronize()
        self._are_on_the_way = False
        return self._copies


class Saver:
    """Saves of one process of a pipeline, one after the other."""

    def __init__(self, rank: int, gather: Gather) -> None:
        self._rank, self._gather = rank, gather
        self._copies = _HostCopies()
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
            folder: of the checkpoints. It and ``keep``, see `publish`, are rank 0's.
            take: gives the manifest of this process's part, without files, and every
                shard to what it is called with.
            keep: checkpoints that stay.

        Returns:
            Why the save before has failed, None if it has not.

        Raises:
            CheckpointError: the state cannot be saved, or the folder cannot be written.
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
        shards = self._copies.finish()
        schedulers = part.values.get("schedulers", {})
        answers = self._gather((partial, problem, earlier, schedulers))
        for _, text, _, _ in answers:
            if text is not None:
                raise CheckpointError(text)
        merge_schedulers(states for *_, states in answers)
        writer = _Writer(
            Path(answers[0][0]), part, shards, self._rank, len(answers), keep
        )
        executor = ThreadPoolExecutor(1, thread_name_prefix="zbpp save")
        self._writing = executor.submit(writer.run)
        executor.shutdown(wait=False)  # the thread ends with its work
        return _first_cause(failure for _, _, failure, _ in answers)

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
    shards: Mapping[str, Shard]
    rank: int
    n_ranks: int
    keep: int | None

    def run(self) -> Failure | None:
        """Write; rank 0 then waits for the others and publishes."""
        try:
            file = write_shards(self.partial, self.rank, self.shards)
            part = replace(self.part, files=[file])
            write_durably(self.partial / _PART.format(self.rank), part.text())
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

    def _wait_for_parts(self) -> list[Manifest]:
        """Wait for the manifests that all processes have written, by rank."""
        deadline, wait_s = time.monotonic() + _PATIENCE_S, _FIRST_WAIT_S
        part_of = {_PART.format(rank): rank for rank in range(self.n_ranks)}
        while True:
            names = {path.name for path in self.partial.iterdir()}
            missing = [rank for name, rank in part_of.items() if name not in names]
            if not missing:
                return [read_manifest(self.partial, name) for name in part_of]
            for rank in missing:
                if (marker := f"failed-{rank}") in names:
                    text = (self.partial / marker).read_text()
                    raise CheckpointError(f"rank {rank} failed: {text}")
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + _PATIENCE_AT_EXIT_S)
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"rank(s) {missing} have not written to {self.partial} within "
                    f"{_PATIENCE_S:g} s; is it one folder for all processes?"
                )
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _LONGEST_WAIT_S)

    def _publish(self, parts: list[Manifest]) -> None:
        """Join the parts: tables of all stages, and what rank 0 alone has."""
        values: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        for part in parts:
            aliases |= part.aliases
            for name, value in part.values.items():
                values.setdefault(name, {}).update(value)
        files = [file for part in parts for file in part.files]
        manifest = replace(self.part, files=files, aliases=aliases, values=values)
        write_durably(self.partial / MANIFEST, manifest.text())
        for path in self.partial.glob(_PART.format("*")):
            path.unlink()
        publish(self.partial, step=self.part.step, keep=self.keep)
