"""Start one local process per stage, and end all of them when one fails.

    launch(worker, args, 4)
      rank 0 .. 3: join the process group, run worker(*args)
      one fails:   it writes down why and leaves at once
                   the others are killed (also a stopped one), its error is raised

The processes are started and watched by `torch.multiprocessing`. Torch's elastic
launcher stands above it, but waits 30 s for a process that hangs before it kills it,
starts a refused request again, and listens on all networks.

A process that merely lost its peer is a victim: it stays a moment longer, so that the
first process that ends is the one that made the others fail.
"""

import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from zbpp.core import RequestError, WorkerError
from zbpp.runtime.comm.process_group import initialise, use_loopback
from zbpp.runtime.support.devices import accelerator, asked_device
from zbpp.runtime.support.errors import PeerError

__all__ = [
    "is_launched",
    "launch",
    "leave_with_parent",
    "run_launched",
]

_VICTIM_STAYS_S = 1.0  # for the report of the cause, on a busy machine
_TORCHS_LOG = logging.getLogger("torch.multiprocessing.spawn")


def launch(
    worker: Callable[..., object],
    args: tuple[Any, ...],
    n_processes: int,
    *,
    device: str = "auto",
    timeout_s: float = 600.0,
    stops_itself: bool = False,
) -> None:
    """Run ``worker(*args)`` in processes that form one process group.

    Args:
        worker: a function that can be pickled.
        args: its arguments, which can be pickled.
        n_processes: number of ranks.
        device: "auto", "cpu" or an accelerator's kind; chooses the backend.
        timeout_s: for joining the process group.
        stops_itself: the worker ends soon after SIGTERM, so it is waited for.

    Raises:
        SystemExit: SIGTERM has stopped the run.
        RequestError: a worker refused the request.
        WorkerError: a worker raised or was killed.
    """
    _TORCHS_LOG.setLevel(logging.ERROR)  # else a line for each process that it ends
    method = _start_method(device)
    reports = Path(tempfile.mkdtemp(prefix="zbpp-"))
    passed_args = (worker, args, n_processes, str(reports), device, timeout_s)
    processes: list[BaseProcess] = []
    failure: Exception | None = None
    try:
        with _no_orphans(processes, stop_themselves=stops_itself) as signals:
            context = start_processes(  # type: ignore[no-untyped-call]
                _work, passed_args, n_processes, join=False, start_method=method
            )
            processes += context.processes
            if signals:
                raise _end(signals[0])
            try:
                while not context.join(grace_period=0):
                    pass
            except ProcessExitedException as error:
                failure = _failure(error, reports)
    finally:
        if not any(reports.glob("*.txt")):
            for file in reports.iterdir():
                file.unlink()
            reports.rmdir()
    if signal.SIGTERM in signals or (signals and failure is not None):
        raise SystemExit(128 + signals[0])
    if failure is not None:
        raise failure


def _start_method(device: str) -> str:
    """Processes that share no state; where it can be, they are forked from one that
    has imported torch, which takes seconds. A first optimizer imports torch's compiler
    too, which may ask for GPUs: a process that has done so must not fork on one.
    """
    if sys.platform != "linux":
        return "spawn"
    on_cpu = device == "cpu" or accelerator() is None
    compiler = ["torch._dynamo"] if on_cpu else []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["zbpp.pipeline", *compiler])
    # SIGTERM to the whole process group must spare the fork server: workers could not
    # be told from dead ones without it. It inherits the blocked signal; `_work`
    # unblocks it.
    resource_tracker.ensure_running()  # it would unblock SIGTERM here
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return "forkserver"


@contextmanager
def _no_orphans(
    processes: list[BaseProcess], *, stop_themselves: bool
) -> Iterator[list[int]]:
    """Leave no process behind: not after an error, Ctrl-C or SIGTERM.

    Gives the signals that came while no process was in the list yet (one that is
    half started is known to nobody, so the start is not interrupted), or that were
    passed on to processes that stop themselves.
    """
    noted: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if processes and (noted or not stop_themselves):
            raise _end(number)
        noted.append(number)
        for process in processes:
            if process.exitcode is None:
                process.terminate()

    numbers = (signal.SIGTERM, signal.SIGINT)
    handlers = {number: signal.signal(number, stop) for number in numbers}
    others = set(multiprocessing.active_children())
    try:
        yield noted
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        left = set(multiprocessing.active_children()) - others
        for process in left:
            process.kill()
        for process in left:
            process.join()


def _end(number: int) -> BaseException:
    """Make the exception that ends a run which this signal has stopped."""
    interrupted = number == signal.SIGINT
    return KeyboardInterrupt() if interrupted else SystemExit(128 + number)


def _work(
    rank: int,
    worker: Callable[..., object],
    args: tuple[Any, ...],
    n_processes: int,
    reports: str,
    device: str,
    timeout_s: float,
) -> None:
    """Run the worker in a process of its own, and write down why it fails."""
    leave_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent sees it and ends us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n_processes),
        "LOCAL_WORLD_SIZE": str(n_processes),
    }
    use_loopback()
    torch.set_num_threads(1)
    try:
        place = asked_device(device)
        file = str(Path(reports) / "store")
        store = dist.FileStore(file, n_processes)  # type: ignore[attr-defined]
        initialise(place, timeout_s=timeout_s, store=store)
        worker(*args)
        dist.destroy_process_group()
    except BaseException as error:
        _fail(error, rank=rank, reports=Path(reports))


def is_launched() -> bool:
    """True in a process that torchrun, or its like, has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_launched(worker: Callable[[], int | None]) -> NoReturn:
    """Be one of torchrun's processes: run the worker and end by its exit code."""
    leave_with_parent()
    try:
        code = worker() or 0
        if dist.is_initialized():
            dist.barrier()
    except BaseException as error:
        _fail(error, rank=int(os.environ["RANK"]))
    print(end="", flush=True)
    os._exit(code)  # an orderly end has been seen to abort in torch's own threads


def leave_with_parent(poll_s: float = 1.0) -> None:
    """Leave when the process that has started this one is gone, however it went.

    Torchrun's agent is no parent that multiprocessing knows, so it is looked for.
    The other ranks then lose this one, and are started again where that was asked for.
    """
    launcher, agent = multiprocessing.parent_process(), os.getppid()

    def watch() -> None:
        if launcher is not None:
            launcher.join()
        while launcher is None and os.getppid() == agent:
            time.sleep(poll_s)
        try:
            print(
                f"zbpp: rank {os.environ.get('RANK')}: the process {agent} that has "
                "started it is gone; it ends",
                file=sys.stderr,
                flush=True,
            )
        finally:  # stderr may be gone too
            os._exit(1)

    threading.Thread(target=watch, name="zbpp parent watch", daemon=True).start()


def _fail(error: BaseException, *, rank: int, reports: Path | None = None) -> NoReturn:
    """Tell why this process ends, and leave: a send to a hung peer would block an exit.

    Args:
        error: the cause.
        rank: of this process.
        reports: the launcher's folder; None (torchrun): tell on stderr.
    """
    request = isinstance(error, RequestError)
    is_clear = isinstance(error, RequestError | PeerError | WorkerError)
    notes = [f"({note})" for note in getattr(error, "__notes__", [])]
    message = " ".join([f"{type(error).__name__}: {error}", *notes])
    if is_clear:
        message = str(error)
    if isinstance(error, PeerError):
        time.sleep(_VICTIM_STAYS_S)
    if reports is None:
        if not is_clear:
            traceback.print_exception(error)
        print(f"zbpp: rank {rank}: {message}", file=sys.stderr)
    else:
        if not request:
            text = "".join(traceback.format_exception(error))
            (reports / f"rank{rank}.txt").write_text(text)
        report = {"request": request, "message": message}
        (reports / f"rank{rank}.json").write_text(json.dumps(report))
    print(end="", flush=True)  # stdout may be closed, and then be None
    sys.stderr.flush()
    os._exit(2 if request else 1)


def _failure(error: ProcessExitedException, reports: Path) -> Exception:
    """The error of the process that ended first, from its report if it left one."""
    rank = error.error_index
    report = reports / f"rank{rank}.json"
    if error.signal_name is not None:
        return WorkerError(f"rank {rank} was killed by {error.signal_name}")
    if not report.exists():
        return WorkerError(
            f"rank {rank} ended with exit code {error.exit_code} and no message"
        )
    failure = json.loads(report.read_text())
    if failure["request"]:
        return RequestError(failure["message"])
    log = report.with_suffix(".txt")
    return WorkerError(f"rank {rank} failed: {failure['message']} (traceback: {log})")
