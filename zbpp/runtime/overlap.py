"""Passes that stop where their layers communicate, and let others compute meanwhile.

    compute    | F attention | B experts'  | F experts   | B attention'
    network    | B combine'  | F dispatch  | B dispatch' | F combine

A layer calls `overlap_point` where it communicates. There its pass stops, and the
executor continues with its program: it lets another pass compute up to its next point,
runs a W, or resumes this pass, whose communication it then waits for. So exactly one
computes at any time, and the passes communicate one after the other, in the order in
which they reach their points. The program and the points decide this order, and no
clock: all processes that run the same program issue their collectives alike.

In a backward a point is a point again: two nodes that hand gradients on as they are
stand around the communication.

    F   x -> [ends] -> communicate -> [begins] -> y
    B   dx <- [ends] <- communicate' <- [begins] <- dy

On a CPU a communication blocks its thread, so the pass stops before it begins. On an
accelerator it is issued to a separate stream first, behind all that computes; then
the pass stops; when it resumes, computation waits for the end of the communication.
All that computes stays on the stage's stream: gradients, saved tensors and random
numbers meet no other stream, and are those of the same passes in a row.

Each pass that stops runs in a separate thread, with the caller's state of torch. One
F at a time is open, as all F's draw from the same generators, and one backward of each
chunk, as its gradients are added in the order of the micro-batches.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from threading import Event, Semaphore, Thread
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from zbpp.core import Pass, PassKind
from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.support.streams import NetworkStream
from zbpp.runtime.support.thread_state import ThreadState
from zbpp.runtime.support.torch_internals import arrived

P = ParamSpec("P")
T = TypeVar("T")


class PassStoppedError(RuntimeError):
    """Ends a pass that waits at a point, in a step that has failed; internal."""


class _Watched:
    """A forward that runs as a whole, and notes that it has points.

    Its communications run on the network of an accelerator, else where they are.
    """

    is_forward = True

    def __init__(self, network: NetworkStream | None = None) -> None:
        self.network = network
        self.has_points = False

    def leave(self) -> None:
        """The pass begins to communicate: others compute; called in its thread."""

    def come_back(self) -> None:
        """The pass has communicated: wait until it may go on; called in its thread."""

    def await_network(self) -> None:
        """Wait while others communicate; called in its thread."""

    def communicate(
        self, run: Callable[[], T], tensors: Sequence[Tensor], on_device: bool
    ) -> T:
        """Run the communication of a forward, which reads tensors."""
        self.has_points = True
        if not self.is_forward:
            # A recomputed forward: an F during it would draw its random numbers.
            self.await_network()
            return run()
        if self.network is None or not on_device:
            self.leave()
            result = run()
            self.come_back()
            return result
        self.network.begin(tensors)
        with self.network.stream:
            result = run()
        event = self.network.stream.record_event()
        self.leave()
        self.come_back()
        self.network.end(event, tensors_in(result))
        return result


_pass: ContextVar[_Watched | None] = ContextVar("pass_with_points", default=None)
"""The pass that runs in this thread; None where points mean nothing."""


class OpenPass(_Watched):
    """A pass in a separate thread, which computes when `go_on` is called.

    No wait here has a time-out: what is waited for computes, or is in a communication,
    which has one.
    """

    def __init__(
        self, overlap: "Overlap", compute: Callable[[], None], *, is_forward: bool
    ) -> None:
        super().__init__(overlap.network)
        self.is_forward = is_forward
        self._overlap = overlap
        self._has_communicated = Event()
        self._error: BaseException | None = None
        self._is_over = self._is_stopped = False
        self._go, self._back = Semaphore(0), Semaphore(0)
        run = partial(ThreadState(overlap.device).run, partial(self._run, compute))
        name = f"zbpp {'forward' if is_forward else 'backward'}"
        self._thread = Thread(target=run, name=name, daemon=True)

    def go_on(self) -> bool:
        """Compute up to where the pass begins to communicate; True: to its end."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        is_over = self._is_over
        if is_over:
            self._thread.join()  # else the next pass may begin before it has ended
        if self._error is not None:
            raise self._error
        return is_over

    def stop(self) -> None:
        """End the pass at the point where it waits, or at its next one."""
        self._is_stopped = True
        if self._thread.ident is not None:
            self._go.release()
            self._thread.join()

    def leave(self) -> None:
        """Let others compute, and wait for the communication before this one."""
        before = self._overlap.network_is_free
        self._has_communicated = self._overlap.network_is_free = Event()
        self._back.release()
        before.wait()
        self._refuse_if_stopped()

    def come_back(self) -> None:
        """Let the next one communicate, and wait for `go_on`."""
        self._has_communicated.set()
        self._go.acquire()
        self._refuse_if_stopped()

    def await_network(self) -> None:
        """Wait for the communication that began last."""
        self._overlap.network_is_free.wait()

    def _refuse_if_stopped(self) -> None:
        if self._is_stopped:
            raise PassStoppedError

    def _run(self, compute: Callable[[], None]) -> None:
        _pass.set(self)
        try:
            compute()
        except PassStoppedError:
            pass  # the code that stopped it raises what has failed
        except BaseException as error:
            self._error = error
        self._is_over = True
        self._has_communicated.set()
        self._back.release()


class _MarkedPass(_Watched):
    """A pass that runs alone: it records when it communicates and computes."""

    def __init__(self, now: Callable[[], Any], *, is_forward: bool) -> None:
        super().__init__()
        self.is_forward = is_forward
        self.noted: list[Any] = []
        self._now = now

    def leave(self) -> None:
        if len(self.noted) % 2 == 0:
            self.noted.append(self._now())

    def come_back(self) -> None:
        if len(self.noted) % 2:
            self.noted.append(self._now())


@contextmanager
def _as_pass(running: _Watched) -> Iterator[None]:
    """Within this the points of a pass find it."""
    token = _pass.set(running)
    try:
        yield
    finally:
        _pass.reset(token)


@contextmanager
def marked(now: Callable[[], T], *, is_forward: bool) -> Iterator[list[T]]:
    """Note where a pass communicates: on an accelerator too, it waits for that there.

    It yields a list of times by ``now``: the first communication begins, has ended, and
    so on. The forward of a marked backward is marked too.
    """
    marks = _MarkedPass(now, is_forward=is_forward)
    # nodes run in this thread, and see the pass
    with _as_pass(marks), torch.autograd.set_multithreading_enabled(False):
        yield marks.noted


def overlap_point(
    communicate: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function that communicates; other planned jobs run meanwhile.

    A mixture of experts has two such calls in a layer, dispatch and combine:

        tokens = zbpp.overlap_point(self.dispatch, tokens, counts)
        tokens = zbpp.overlap_point(self.combine, self.experts(tokens), counts)

    Outside of a `zbpp.Pipeline`, in plans with neither pairs nor parts, in evaluations
    and in compiled layers it is a plain call. Results and gradients are those of the
    plain call, to the last bit.

    Args:
        communicate: waits for the network, and computes little. Its backward must
            communicate by itself, as that of torch's
            ``all_to_all_single_autograd`` does.
        args: its arguments. All tensors that it reads and that need a gradient, or are
            made by the layer, must be among them or ``kwargs``, also in tuples, lists,
            dicts and what torch's pytree knows.
        kwargs: its keyword arguments.

    Returns:
        The result of the function.
    """
    if torch.compiler.is_compiling():
        return communicate(*args, **kwargs)
    tensors, here = tensors_in((args, kwargs)), _pass.get()
    on_device = here is not None and here.network is not None
    on_device = on_device and any(runs_ahead(x.device) for x in tensors)

    def run() -> T:
        arguments = _with_point((args, kwargs), is_behind=False, on_device=on_device)
        result: T = map_tensors(communicate(*arguments[0], **arguments[1]), arrived)
        return result

    result = run() if here is None else here.communicate(run, tensors, on_device)
    if any(x.requires_grad for x in tensors):  # else no node would mark its end
        result = _with_point(result, is_behind=True, on_device=on_device)
    return result


def _with_point(thing: Any, *, is_behind: bool, on_device: bool) -> Any:
    """Put a node behind the tensors of a thing that need gradients, one for them all.

    Two nodes with the communication between them run in this order in the backward,
    and no other node between them, as autograd goes by the order of a forward's nodes.
    """
    if not torch.is_grad_enabled():
        return thing
    asked = {id(x): x for x in tensors_in(thing) if x.requires_grad}
    if not asked:
        return thing
    apply: Any = _Point.apply  # typed from torch 2.14 on
    others = apply(is_behind, on_device, *asked.values())
    behind = dict(zip(asked, others, strict=True))
    return map_tensors(thing, lambda x: behind.get(id(x), x))


class _Point(torch.autograd.Function):
    """Returns tensors as they are; one call comes before a communication, one after it.

    In a backward the communication begins behind it, and ends before it.
    """

    @staticmethod
    def forward(
        ctx: Any, is_behind: bool, on_device: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.is_behind, ctx.on_device = is_behind, on_device
        ctx.set_materialize_grads(False)
        if is_behind:
            ctx.save_for_backward(torch.empty(0))
        # Returned as they are they would be views, which must not be written to.
        return tuple([x.detach() for x in tensors])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        here = _pass.get()
        if here is not None and not here.is_forward:
            if ctx.is_behind and not ctx.on_device:
                # A recomputed layer runs again now: in the communication it would wait
                # for its end, or draw numbers during an F.
                _ = ctx.saved_tensors
            if ctx.is_behind != ctx.on_device:  # where it is issued, on a device
                here.leave()
            if not ctx.is_behind:
                here.come_back()
        return None, None, *gradients


class Overlap:
    """Of one stage: the chunks with points, and the passes that wait at a point.

    Without ``stops`` no pass stops.
    """

    def __init__(self, device: torch.device, *, stops: bool = True) -> None:
        self.device, self.stops = device, stops
        self.network = NetworkStream(device) if runs_ahead(device) else None
        self.network_is_free = Event()
        """The communication that began last is over: they go one after the other."""
        self.network_is_free.set()
        self._with_points: set[int] = set()
        self._open: dict[Pass, OpenPass] = {}
        self.failed: Pass | None = None
        """The open pass that has raised."""

    @contextmanager
    def watching(self, chunk: int) -> Iterator[None]:
        """A forward runs within this: learn if it has points."""
        running = _pass.get() or _Watched(self.network)
        with _as_pass(running):
            yield
        if running.has_points:
            self._with_points.add(chunk)

    def has_points(self, chunk: int) -> bool:
        """True if a chunk has points; False, too, before its first F."""
        return chunk in self._with_points

    def begin(self, job: Pass, compute: Callable[[], None]) -> None:
        """Let a pass stop at its points; nothing of it runs yet."""
        self._open[job] = OpenPass(self, compute, is_forward=job.kind is PassKind.F)

    def is_open(self, job: Pass) -> bool:
        """True if a pass has begun so, and not ended."""
        return job in self._open

    def go_on(self, job: Pass) -> None:
        """Let a pass compute up to its next point, or its end; see `OpenPass.go_on`."""
        run = self._open[job]
        try:
            is_over = run.go_on()
        except BaseException:
            self.failed = job
            raise
        if is_over:
            del self._open[job]

    def finish(self, job: Pass) -> None:
        """Run a pass to its end, if it is open; for errors see `OpenPass.go_on`."""
        while job in self._open:
            self.go_on(job)

    def finish_forwards(self) -> None:
        """Run F's to their ends: another stage will draw from the same generators."""
        for job in [job for job, run in self._open.items() if run.is_forward]:
            self.finish(job)

    def stop(self) -> None:
        """End all passes where they stand, if a step has failed."""
        while self._open:
            self._open.popitem()[1].stop()
