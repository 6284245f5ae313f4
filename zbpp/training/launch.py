"""Run a command on every rank: in torchrun's processes, in new ones, or in this one.

    start(train, options, ["train", "-p", "4"], plan=plan_of)
      rank 0 .. 3: run zbpp train -p 4 under torch's elastic launcher
      one fails:   it prints why, and leaves at once
                   torch's agent ends the others, with SIGKILL after `grace_s`

A process that merely lost its peer waits a moment before it leaves, so that the first
process that ends is the one that made the others fail.
"""

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch.distributed as dist

from zbpp.core import RequestError, WorkerError
from zbpp.runtime.comm.process_group import use_loopback
from zbpp.runtime.support.errors import PeerError

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_VICTIM_STAYS_S = 1.0  # for the report of the cause, on a busy machine


def start(
    worker: Callable[[Any, Any], int | None],
    options: Any,
    words: Sequence[str],
    *,
    plan: Callable[[Any], Any],
    check: Callable[[Any], None] | None = None,
    grace_s: int = 10,
) -> None:
    """Run a worker on every rank, and return when all have ended.

    Args:
        worker: called with the options and the plan; gives the exit code, if not 0.
        options: of the run.
        words: the command line that asks for it, for new processes.
        plan: makes the plan of the options, before any process is started; refuses
            what cannot run.
        check: refuses what the plan does not show, once, and not on every rank.
        grace_s: seconds that processes have to end after a signal.

    Raises:
        RequestError: the options cannot be met.
        SystemExit: a process failed and has printed why; or a signal stopped the run.
        KeyboardInterrupt: Ctrl-C stopped it.
        WorkerError: a process was killed.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        n = int(os.environ["WORLD_SIZE"])
        if options.stages not in (None, n):
            raise RequestError(
                f"--stages is {options.stages}, but torchrun has started {n} "
                "processes; leave --stages out"
            )
        options = replace(options, stages=n)
        _run_launched(lambda: worker(options, plan(options)))
    planned = plan(options)
    if check is not None:
        check(options)
    if planned.n_stages > 1:
        _launch(words, planned.n_stages, grace_s=grace_s)
    elif code := worker(options, planned):
        raise SystemExit(code)


def _launch(words: Sequence[str], n_processes: int, *, grace_s: int) -> None:
    """Run ``zbpp`` with these words in processes of torchrun."""
    # imports seconds of torch that no other command needs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    # its tables repeat the line that the failed process has printed
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch.distributed.elastic."):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    use_loopback()
    where = ["--standalone", f"--nproc-per-node={n_processes}"]
    try:
        main([*where, f"--shutdown-timeout={grace_s}", "-m", "zbpp", *words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            raise SystemExit(failure.exitcode) from None
        name = signal.Signals(-failure.exitcode).name
        raise WorkerError(f"rank {rank} was killed by {name}") from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None


def _run_launched(worker: Callable[[], int | None]) -> NoReturn:
    """Be one of torchrun's processes: run the worker and end by its exit code."""
    if sys.platform == "linux":  # ends when its parent does, however that went
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        code = worker() or 0
        if dist.is_initialized():
            dist.barrier()
    except (BrokenPipeError, SystemExit):  # the reader has left: `zbpp train | head`
        os._exit(1)
    except BaseException as error:
        _fail(error)
    print(end="", flush=True)
    os._exit(code)  # an orderly end has been seen to abort in torch's threads


def _fail(error: BaseException) -> NoReturn:
    """Print why this process ends, and leave: a send to a hung peer blocks an exit."""
    if isinstance(error, PeerError):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent has seen the cause
        time.sleep(_VICTIM_STAYS_S)
    message = str(error)
    if not isinstance(error, RequestError | PeerError | WorkerError):
        notes = [f"({note})" for note in getattr(error, "__notes__", [])]
        message = " ".join([f"{type(error).__name__}: {error}", *notes])
        traceback.print_exception(error)
    print(f"zbpp: rank {os.environ['RANK']}: {message}", file=sys.stderr)
    print(end="", flush=True)  # stdout may be closed, and then be None
    sys.stderr.flush()
    os._exit(2 if isinstance(error, RequestError) else 1)
