"""Processes of one run that may die, forked from the pool's warm server."""

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from pool import PATIENCE_S, PRELOAD, load_file

__all__ = ["Ended", "Ranks", "end_of", "heed_ctrl_c"]


class Ended(NamedTuple):
    """How a rank ended.

    ``code`` is its exit code, negative for a signal; ``words`` what it printed,
    ``value`` what the function returned, ``place`` how many ranks had ended before.
    """

    code: int
    words: str
    value: Any
    place: int


class Ranks:
    """Ranks that call ``function(*args)``, with the environment that torchrun sets.

    An uncaught exception prints its traceback and ends a rank with code 1, as in a
    script. Ranks that are left at the end of the block are killed.

    Args:
        function: of a module of the tests.
        n: how many processes start.
        world: how many the environment promises; None: ``n``.
    """

    def __init__(
        self, function: Callable[..., Any], n: int, *args: Any, world: int | None = None
    ) -> None:
        from torch.distributed import TCPStore

        self._folder = tempfile.TemporaryDirectory()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        source = function.__code__.co_filename, function.__qualname__
        shared = {
            "WORLD_SIZE": str(world or n),
            "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
        }

        def numbers(rank: int) -> dict[str, str]:
            return {"RANK": str(rank), "LOCAL_RANK": str(rank)}

        self.processes = [
            context.Process(
                target=_run,
                args=(self._file(rank), *source, args, shared | numbers(rank)),
                daemon=True,
            )
            for rank in range(n)
        ]
        for process in self.processes:
            process.start()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def _file(self, rank: int) -> str:
        return f"{self._folder.name}/{rank}"

    def wait(self, *ranks: int) -> list[Ended]:
        """Wait until these ranks, or all, have ended by themselves."""
        chosen = [*ranks] or [*range(len(self.processes))]
        waiting = {self.processes[rank].sentinel: rank for rank in chosen}
        order: list[int] = []
        until = time.monotonic() + PATIENCE_S
        while waiting:
            ready = wait([*waiting], max(0.0, until - time.monotonic()))
            assert ready, f"ranks {[*waiting.values()]} have not ended"
            order += [waiting.pop(int(sentinel)) for sentinel in ready]
        return [self._ended(rank, order.index(rank)) for rank in chosen]

    def _ended(self, rank: int, place: int) -> Ended:
        self.processes[rank].join()
        value = Path(f"{self._file(rank)}.value")
        return Ended(
            self.processes[rank].exitcode,
            Path(f"{self._file(rank)}.words").read_text(),
            pickle.loads(value.read_bytes()) if value.exists() else None,
            place,
        )


def heed_ctrl_c() -> None:
    """A process that a shell's background has started would inherit a deaf ear."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_of(function: Callable[..., Any], n: int, *args: Any) -> list[Ended]:
    """Run ranks to their end."""
    with Ranks(function, n, *args) as ranks:
        return ranks.wait()


def _run(
    at: str, file: str, name: str, args: Any, environment: Mapping[str, str]
) -> None:
    os.environ |= environment
    with open(f"{at}.words", "wb", buffering=0) as words:
        os.dup2(words.fileno(), 1)
        os.dup2(words.fileno(), 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)
    value = getattr(load_file(file), name)(*args)
    Path(f"{at}.value").write_bytes(pickle.dumps(value))
    atexit._run_exitfuncs()  # as at the end of a script
