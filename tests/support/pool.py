"""Worker processes that live as long as the test session: imports cost seconds."""

import importlib.util
import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_modules: dict[str, Any] = {}

_AFTER_ERROR_S = 10  # for the words of ranks that have lost the one that failed


class Pool:
    """Runs a test's function in n processes that form a gloo group."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["zbpp.pipeline"])
        self._context = context
        self._workers: list[tuple[Any, Any]] = []

    def run(
        self, function: Callable[..., Any], n: int, *args: Any, timeout_s: float = 100
    ) -> list[Any]:
        """Call ``function(*args)`` on ranks 0 to n-1; return what each returns.

        A rank that raises or hangs fails the test, and the pool starts afresh. The
        time-out is for hangs: it is generous, as the machine may be busy.
        """
        while len(self._workers) < n:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            self._workers.append((process, here))
        with tempfile.TemporaryDirectory() as folder:
            for rank in range(n):
                source = (function.__code__.co_filename, function.__qualname__)
                store = str(Path(folder) / "store")
                self._workers[rank][1].send((*source, args, rank, n, store))
            results, errors = [], []
            for rank in range(n):
                pipe = self._workers[rank][1]
                if not pipe.poll(timeout_s if not errors else _AFTER_ERROR_S):
                    errors.append(f"rank {rank} did not answer")
                    continue
                try:
                    result, error = pipe.recv()
                except EOFError:
                    result, error = None, "died"
                results.append(result)
                if error:
                    errors.append(f"rank {rank}: {error}")
        if errors:
            self.close()
            raise AssertionError("\n".join(errors))
        return results

    def close(self) -> None:
        """End all workers."""
        for process, pipe in self._workers:
            process.kill()
            process.join()
            pipe.close()
        self._workers.clear()


def _serve(pipe: Any) -> None:
    """Serve calls until this process is killed."""
    import torch
    import torch.distributed as dist

    from zbpp.runtime.comm.process_group import initialise, use_loopback

    torch.set_num_threads(1)
    use_loopback()
    while True:
        file, name, args, rank, n, store_file = pipe.recv()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(n)}
        result, error = None, None
        try:
            store = dist.FileStore(store_file, n)
            initialise(torch.device("cpu"), timeout_s=100, store=store)
            dist.barrier()  # a rank that is done at once must not leave the others
            result = getattr(_load(file), name)(*args)
            dist.barrier()  # and a rank that is done first must not break the rest
        except Exception:
            error = traceback.format_exc()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        pipe.send((result, error))


def _load(file: str) -> Any:
    """Import a test file by its path; test folders are no packages."""
    if file not in _modules:
        name = "pool_" + Path(file).stem
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        _modules[file] = module
    return _modules[file]
