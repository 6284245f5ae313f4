"""Save in the background: the run continues while the files are written.

    caller           copy to host memory | next steps ...
    thread           | write, leave a manifest of this part
    rank 0's thread  |   all parts there: manifest, rename, remove old ones

The processes of a pipeline meet in the file system only, so a save that fails or hangs
delays only itself, and until the rename there is no new checkpoint.
"""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from zbpp.checkpoint.local import merge_schedulers
from zbpp.core import RequestError
from zbpp.runtime.support.devices import runs_ahead

_PART, _FAILED = "part-{}.json", "failed-{}"
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.01, 1.0  # between two looks at the folder
_PATIENCE_S = 600.0  # for the parts of the other processes
_PATIENCE_AT_EXIT_S = 10.0  # the same when the script has ended


class Saver:
    """Saves of one process of a pipeline, one after the other."""

    def __init__(self, rank: int, gather: Gather) -> None:
        self._rank, self._gather = rank, gather
        self._copies: dict[str, Tensor] = {}  # by name, in host memory
        self._writing: Future[str | None] | None = None

    @property
    def is_saving(self) -> bool:
        """True from `begin` until the end of the save is reported."""
        return self._writing is not None

    def begin(
        self,
        folder: Path,
        take: Callable[[], tuple[Manifest, Mapping[str, Shard]]],
        *,
        keep: int | None,
    ) -> str | None:
        """Copy a state and start to write it; every process must call.

        ``take`` gives the manifest of this process's part, without files, and its
        shards on any device. ``folder`` and ``keep`` are rank 0's.

        Returns:
            Why the save before has failed, None if it has not.
        """
        earlier = self._wait()
        partial, problem = "", None
        try:
            part, shards = take()
            shards = self._copy(shards)
            if self._rank == 0:
                partial = str(make_partial(folder, part.step))
        except RequestError as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write to {folder}: {error.strerror}"
        answers = self._gather((partial, problem, earlier))
        for _, text, _ in answers:
            if text is not None:
                raise CheckpointError(text)
        partial = answers[0][0]
        failure: str | None = answers[0][2]
        writer = _Writer(Path(partial), part, shards, self._rank, len(answers), keep)
        executor = ThreadPoolExecutor(1, thread_name_prefix="zbpp save")
        self._writing = executor.submit(writer.run)
        executor.shutdown(wait=False)  # the thread ends with its work
        return failure

    def _copy(self, shards: Mapping[str, Shard]) -> dict[str, Shard]:
        """Copy shards to host memory, that of the save before where it fits.

        A save blocks its caller for these copies only. Memory that was used before is
        written at several times the speed of fresh memory, whose pages are cleared one
        by one.
        """
        copies: dict[str, Tensor] = {}
        are_async = False
        for name, (numbers, _) in shards.items():
            copy, is_async = self._copies.get(name), runs_ahead(numbers.device)
            kind = numbers.shape, numbers.dtype
            if copy is None or (copy.shape, copy.dtype) != kind:
                copy = torch.empty(
                    numbers.shape, dtype=numbers.dtype, pin_memory=is_async
                )
            copies[name] = copy.copy_(numbers, non_blocking=is_async)
            are_async |= is_async
        if are_async:
            torch.accelerator.synchronize()
        self._copies = copies
        return {name: Shard(copies[name], shards[name].offsets) for name in copies}

    def finish(self) -> str | None:
        """Wait for the last save; return why it has failed. Every process must call."""
        failure: str | None = self._gather(self._wait())[0]
        return failure

    def _wait(self) -> str | None:
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None


@dataclass
class _Writer:
    """One save of one process."""

    partial: Path
    part: Manifest
    shards: Mapping[str, Shard]
    rank: int
    n_ranks: int
    keep: int | None

    def run(self) -> str | None:
        """Write, and publish on rank 0, whose failure counts for all."""
        try:
            file = write_shards(self.partial, self.rank, self.shards)
            part = replace(self.part, files=[file])
            write_durably(self.partial / _PART.format(self.rank), part.text())
            failure = self._wait_for_parts() if self.rank == 0 else None
            if self.rank == 0 and failure is None:
                self._publish()
        except Exception as error:
            is_expected = isinstance(error, OSError | ValueError)
            text = str(error) if is_expected else f"{type(error).__name__}: {error}"
            failure = f"rank {self.rank}: {text}"
        if failure is not None and self.rank == 0:
            shutil.rmtree(self.partial, ignore_errors=True)
        elif failure is not None:
            with suppress(OSError):  # a full disk still takes a name
                (self.partial / _FAILED.format(self.rank)).write_text(failure)
        return failure

    def _wait_for_parts(self) -> str | None:
        """Wait until all processes have written; return why one of them has not."""
        deadline, wait_s = time.monotonic() + _PATIENCE_S, _FIRST_WAIT_S
        while True:
            names = {path.name for path in self.partial.iterdir()}
            missing = [r for r in range(self.n_ranks) if _PART.format(r) not in names]
            if not missing:
                return None
            for rank in missing:
                if (marker := _FAILED.format(rank)) in names:
                    text = (self.partial / marker).read_text()
                    return text or f"rank {rank}: cannot write to {self.partial}"
            if not threading.main_thread().is_alive():
                deadline = min(deadline, time.monotonic() + _PATIENCE_AT_EXIT_S)
            if time.monotonic() > deadline:
                return (
                    f"rank(s) {missing} have not written to {self.partial} within "
                    f"{_PATIENCE_S:g} s; is it one folder for all processes?"
                )
            time.sleep(wait_s)
            wait_s = min(1.5 * wait_s, _LONGEST_WAIT_S)

    def _publish(self) -> None:
        """Join the parts: tables of all stages, and the rest, of rank 0."""
        paths = [self.partial / _PART.format(rank) for rank in range(self.n_ranks)]
        parts = [read_manifest(self.partial, path.name) for path in paths]
        merge_schedulers(part.values.get("schedulers", {}) for part in parts)
        values: dict[str, Any] = {}
        aliases: dict[str, str] = {}
        for part in parts:
            aliases |= part.aliases
            for name, value in part.values.items():
                values.setdefault(name, {}).update(value)
        files = [file for part in parts for file in part.files]
        manifest = replace(self.part, files=files, aliases=aliases, values=values)
        write_durably(self.partial / MANIFEST, manifest.text())
        for path in paths:
            path.unlink()
        publish(self.partial, self.part.step, keep=self.keep)
