"""Start one local process per stage, and end all of them when one fails.

    launch(worker, args, 4)
      rank 0 .. 3: join the process group, run worker(*args)
      one fails:   it writes down why and leaves at once
                   the others are killed (also a stopped one), the first cause is raised

A process that merely lost its peer is a victim: the cause is looked for elsewhere
before it is believed.
"""

import json
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
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from zbpp.core import RequestError, WorkerError
from zbpp.runtime.comm.process_group import initialise, use_loopback
from zbpp.runtime.support.devices import accelerator, asked_device
from zbpp.runtime.support.errors import PeerError

__all__ = ["error_that_came_first", "fail", "launch", "leave_with_parent"]

_PATIENCE_S = 0.3  # how long a victim's report waits for that of the cause


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
    context = _process_context(device)
    reports = Path(tempfile.mkdtemp(prefix="zbpp-"))
    processes = [
        context.Process(
            target=_work,
            args=(worker, args, rank, n_processes, str(reports), device, timeout_s),
            name=f"zbpp rank {rank}",
        )
        for rank in range(n_processes)
    ]
    try:
        with _killed_at_exit(processes, stop_themselves=stops_itself) as stopped:
            for process in processes:
                if stopped:  # a worker that is started now would not hear of it
                    raise SystemExit(128 + stopped[0])
                process.start()
            failed = _first_failure(processes, reports)
    finally:
        if not any(reports.glob("*.txt")):
            for file in reports.iterdir():
                file.unlink()
            reports.rmdir()
    if signal.SIGTERM in stopped or (stopped and failed is not None):
        raise SystemExit(128 + stopped[0])
    if failed is not None:
        raise failed


def _process_context(device: str) -> SpawnContext | ForkServerContext:
    """Processes that share no state; where it can be, they are forked from one that
    has imported torch, which takes seconds. A first optimizer imports torch's compiler
    too, which may ask for GPUs: a process that has done so must not fork on one.
    """
    if sys.platform != "linux":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    on_cpu = device == "cpu" or accelerator() is None
    compiler = ["torch._dynamo"] if on_cpu else []
    context.set_forkserver_preload(["zbpp.pipeline", *compiler])
    _start_fork_server()
    return context


def _start_fork_server() -> None:
    """Start the fork server so that SIGTERM to the whole process group spares it.

    Workers could not be told from dead ones without it. It inherits the blocked signal;
    `_work` unblocks it.
    """
    resource_tracker.ensure_running()  # it would unblock SIGTERM here
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _first_failure(processes: list[Any], reports: Path) -> Exception | None:
    """Wait for the first process that fails; find the cause among all that have."""
    running: dict[Any, Any] = {process.sentinel: process for process in processes}
    deadline: float | None = None
    while running and (deadline is None or time.monotonic() < deadline):
        rest = None if deadline is None else max(0.0, deadline - time.monotonic())
        for sentinel in wait(list(running), timeout=rest):
            running.pop(sentinel).join()
        cause = _cause(processes, reports)
        if cause is not None:
            return cause
        if deadline is None and any(process.exitcode for process in processes):
            deadline = time.monotonic() + _PATIENCE_S
    victims = sorted(_read_reports(reports), key=lambda report: report["time"])
    return _error(victims[0], reports) if victims else None


def _cause(processes: list[Any], reports: Path) -> Exception | None:
    """The failure that made the others fail, if it is known yet."""
    found = _read_reports(reports)
    told = {report["rank"] for report in found}
    for rank, process in enumerate(processes):
        if process.exitcode and rank not in told:
            return WorkerError(f"rank {rank} {_how_it_ended(process.exitcode)}")
    causes = [report for report in found if report["kind"] != PeerError.__name__]
    if causes:
        return _error(min(causes, key=lambda report: report["time"]), reports)
    return None


def _how_it_ended(exitcode: int) -> str:
    if exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} and no message"


def _read_reports(reports: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in reports.glob("*.json")]


def _error(report: dict[str, Any], reports: Path) -> Exception:
    if report["request"]:
        return RequestError(report["message"])
    log = reports / f"rank{report['rank']}.txt"
    return WorkerError(
        f"rank {report['rank']} failed: {report['message']} (traceback: {log})"
    )


def _work(
    worker: Callable[..., object],
    args: tuple[Any, ...],
    rank: int,
    n_processes: int,
    reports: str,
    device: str,
    timeout_s: float,
) -> None:
    """Run the worker in a process of its own, and write down why it fails."""
    _die_with_parent()
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
    except BaseException as error:
        fail(error, rank=rank, reports=Path(reports))
    dist.destroy_process_group()


def fail(error: BaseException, *, rank: int, reports: Path | None = None) -> NoReturn:
    """Tell why this process ends, and leave: a send to a hung peer would block an exit.

    Args:
        error: the cause.
        rank: of this process.
        reports: the launcher's folder; None (torchrun): tell on stderr.
    """
    first = error_that_came_first(error)
    message = " ".join([f"{type(first).__name__}: {first}", *_notes(first)])
    request = isinstance(first, RequestError)
    is_clear = isinstance(first, RequestError | PeerError | WorkerError)
    if is_clear:
        message = str(first)
    if first is not error:
        message += f"; and then {type(error).__name__}: {error}"
    if reports is None:
        if not is_clear:
            traceback.print_exception(error)
        print(f"zbpp: rank {rank}: {message}", file=sys.stderr)
    else:
        if not request:
            text = "".join(traceback.format_exception(error))
            (reports / f"rank{rank}.txt").write_text(text)
        report = {
            "rank": rank,
            "kind": type(first).__name__,
            "request": request,
            "message": message,
            "time": time.time(),
        }
        draft = reports / f"rank{rank}.draft"
        draft.write_text(json.dumps(report))
        draft.rename(reports / f"rank{rank}.json")  # readers see all of it or nothing
    print(end="", flush=True)  # stdout may be closed, and then be None
    sys.stderr.flush()
    os._exit(2 if request else 1)


def error_that_came_first(error: BaseException) -> BaseException:
    """Return the error that others came after, while it was handled."""
    last: BaseException = error
    while last.__cause__ is not None:
        last = last.__cause__
    before = None if last.__suppress_context__ else last.__context__
    return error if before is None else error_that_came_first(before)


def _notes(error: BaseException) -> list[str]:
    return [f"({note})" for note in getattr(error, "__notes__", [])]


def _die_with_parent() -> None:
    """Leave when the launcher is gone, however it went (SIGKILL leaves no trace)."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="zbpp parent watch", daemon=True).start()


def leave_with_parent(poll_s: float = 1.0) -> None:
    """Leave when the process that has started this one is gone: torchrun's agent.

    The other ranks then lose this one, and are started again where that was asked for.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        print(
            f"zbpp: rank {os.environ.get('RANK')}: the process {parent} that has "
            "started it is gone; it ends",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    threading.Thread(target=watch, name="zbpp parent watch", daemon=True).start()


@contextmanager
def _killed_at_exit(
    processes: list[Any], *, stop_themselves: bool
) -> Iterator[list[int]]:
    """Leave no process behind: not after an error, Ctrl-C or SIGTERM.

    Gives the signals that were passed on, to processes that stop themselves.
    """
    passed_on: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if not stop_themselves or passed_on:
            raise SystemExit(128 + number)
        passed_on.append(number)
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                os.kill(process.pid, signal.SIGTERM)

    numbers = [signal.SIGTERM, *([signal.SIGINT] if stop_themselves else [])]
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield passed_on
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for process in processes:
            if process.pid is not None:
                process.kill()
        for process in processes:
            if process.pid is not None:
                process.join()
