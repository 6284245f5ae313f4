"""Worker processes that live as long as the test session: imports cost seconds."""

import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
PATIENCE_S = 200.0
"""For work of seconds on an idle machine; the time-out of the tests is longer."""
AFTER_ERROR_S = 10.0
"""For the words of ranks that have lost the one that failed."""

PRELOAD = ["zbpp.pipeline", "torch._dynamo"]
"""For all processes that a session forks; the first request sets it."""

_CACHE = type(lru_cache(lambda: None))
_DTENSORS = "torch.distributed.tensor"

Prepare = Callable[[str, int, int], None]

_modules: dict[str, Any] = {}


class Pool:
    """Runs a test's function in n processes that form a process group.

    Args:
        preload: what the processes import before all else.
        device: of each process; zbpp chooses the backend for it.
        prepare: called with a folder of the run, the rank, and how many there are,
            before the group is made.
    """

    def __init__(
        self,
        preload: Sequence[str] = (),
        *,
        device: str = "cpu",
        prepare: Prepare | None = None,
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*preload, *PRELOAD])
        self._context = context
        self._place = device, prepare
        self._workers: list[tuple[Any, Any]] = []

    def run(
        self,
        function: Callable[..., Any],
        n: int,
        *args: Any,
        timeout_s: float = PATIENCE_S,
    ) -> list[Any]:
        """Call ``function(*args)`` on ranks 0 to n-1; return what each returns.

        A rank that raises or hangs fails the test, and the pool starts afresh. The
        time-out is for hangs: it is generous, as the machine may be busy.
        """
        self._start(n)
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(n):
                source = (function.__code__.co_filename, function.__qualname__)
                self._workers[rank][1].send((*source, args, rank, n, folder))
            answers, errors = self._answers(n, timeout_s)
            if errors:
                self.close()
                errors += self.explain(Path(folder))
        if errors:
            raise AssertionError("\n".join(errors))
        return [answers[rank] for rank in range(n)]

    def explain(self, folder: Path) -> list[str]:
        """Describe a failed run by the files in its folder."""
        return []

    def _answers(self, n: int, timeout_s: float) -> tuple[dict[int, Any], list[str]]:
        """By rank; after the first error the others have a few seconds left."""
        answers: dict[int, Any] = {}
        errors: list[str] = []
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:n])}
        while waiting:
            ready = wait([*waiting], timeout_s if not errors else AFTER_ERROR_S)
            if not ready:
                errors += [f"rank {rank} did not answer" for rank in waiting.values()]
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    answers[rank], error = pipe.recv()
                except EOFError:
                    error = "died"
                if error:
                    errors.append(f"rank {rank}: {error}")
        return answers, errors

    def _start(self, n: int) -> None:
        while len(self._workers) < n:
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(there, *self._place), daemon=True
            )
            process.start()
            self._workers.append((process, here))

    def close(self) -> None:
        """End all workers."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()


def _serve(pipe: Any, device: str, prepare: Prepare | None) -> None:
    """Run what comes through the pipe, until the process is killed."""
    import torch
    import torch.distributed as dist

    from zbpp.runtime import use_loopback

    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored
    torch.set_num_threads(1)
    use_loopback()
    caches = _caches()
    gc.freeze()  # what is imported is no garbage, and takes a collection 0.2 s to visit
    barrier = partial(dist.barrier, device_ids=None if device == "cpu" else [0])
    while True:
        file, name, args, rank, n, folder = pipe.recv()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n)}
        result, error = None, None
        try:
            if prepare is not None:
                prepare(folder, rank, n)
            dist.init_process_group(
                dist.get_default_backend_for_device(device),
                store=dist.FileStore(f"{folder}/store", n),
                rank=rank,
                world_size=n,
                timeout=timedelta(seconds=PATIENCE_S),
            )
            barrier()  # a rank that is done at once must not leave the others
            result = getattr(load_file(file), name)(*args)
            barrier()  # and a rank that is done first must not break the rest
        except Exception:
            error = traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                _forget_meshes(caches)
        pipe.send((result, error))


def _caches() -> list[Any]:
    """Caches of DTensors, of all objects that are not frozen."""
    return [
        found
        for found in gc.get_objects()
        if type(found) is _CACHE and found.__module__.startswith(_DTENSORS)
    ]


def _forget_meshes(caches: list[Any]) -> None:
    """Let DTensors forget the groups that are gone.

    A new mesh equals the old one; and each of gloo's threads, which live as long as
    their group, wakes a hundred times a second.

    Args:
        caches: those that were there when objects were frozen; new ones are added.
    """
    if _DTENSORS in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        _redistribute.clear_redistribute_planner_cache()
        debug._clear_sharding_prop_cache()
        caches += _caches()
        for cache in caches:
            cache.cache_clear()
    gc.collect()
    gc.freeze()  # what has been imported meanwhile


def load_file(file: str) -> Any:
    """Import a test file by its path; test folders are no packages.

    Its name contains its folders: files of two folders may have the same name.
    """
    if file not in _modules:
        inside = Path(file).resolve().relative_to(TESTS).with_suffix("")
        name = "_".join(("pool", *inside.parts))
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        _modules[file] = module
    return _modules[file]
