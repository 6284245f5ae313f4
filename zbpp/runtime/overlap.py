"""A forward beside the backward of another micro-batch: they take turns at points.

    compute    | F attention | B experts'  | F experts   | B attention'
    network    | B combine'  | F dispatch  | B dispatch' | F combine

A layer says by `overlap_point` where it communicates. Of a pair one half computes
while the other one communicates; where the one that computes comes to a point of its
own, they change places. So exactly one computes at any time and at most one
communicates, in an order that the points alone decide, and no clock: collectives are
issued in the same order by all processes that run the same pair. B begins if it has
points: a layer that ends with a communication has one before it computes anything.

In a backward a point is a point again: two nodes that hand gradients on as they are
stand around the communication.

    F   x -> [ends] -> communicate -> [begins] -> y
    B   dx <- [ends] <- communicate' <- [begins] <- dy

On a CPU a communication holds up its thread, so places are changed before it begins. On
an accelerator it is issued to a stream of its own first, behind all that computes; then
places are changed; and computing goes on behind its end. All that computes, of both
halves, stays on the stage's stream: gradients, saved tensors and random numbers meet no
other stream, and are those of a forward and a backward in a row.

F runs in the caller's thread, B in one of its own, with the caller's state of torch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from threading import Condition, Thread
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from zbpp.runtime.support.devices import runs_ahead
from zbpp.runtime.support.pytree import map_tensors, tensors_in
from zbpp.runtime.support.streams import NetworkStream
from zbpp.runtime.support.thread_state import ThreadState
from zbpp.runtime.support.torch_internals import arrived

__all__ = ["Half", "Overlap", "PairedRun", "marked", "overlap_point"]

P = ParamSpec("P")
T = TypeVar("T")


class Half(Enum):
    """One of the two passes of a pair."""

    FORWARD = "F"
    BACKWARD = "B"

    @property
    def other(self) -> "Half":
        """The one beside it."""
        return Half.BACKWARD if self is Half.FORWARD else Half.FORWARD


class OtherHalfFailedError(RuntimeError):
    """Ends a half whose other half has raised; users see what that has raised."""


class Turns:
    """Decides which half of a pair computes.

    No wait here has a time-out: the half that is waited for computes, or is in a
    communication, which has one.

    Args:
        first: the half that computes first.
    """

    def __init__(self, first: Half) -> None:
        self._changed = Condition()
        self._computes = first
        self._communicates: Half | None = None
        self._ended: set[Half] = set()
        self.failed: Half | None = None
        """The half that has raised first."""

    def begin(self, half: Half) -> None:
        """Wait for a half's first turn.

        Raises:
            OtherHalfFailedError: the other one has raised.
        """
        with self._changed:
            self._wait(lambda: self._computes is half)

    def leave(self, half: Half) -> None:
        """A half begins to communicate: the other one computes.

        Raises:
            OtherHalfFailedError: the other one has raised.
        """
        with self._changed:
            self._wait(lambda: self._communicates is not half.other)
            self._communicates = half
            if half.other not in self._ended:
                self._computes = half.other
            self._changed.notify_all()

    def come_back(self, half: Half) -> None:
        """A half has communicated, if it did: wait until it may compute again.

        Raises:
            OtherHalfFailedError: the other one has raised.
        """
        with self._changed:
            self._free_network(half)
            self._wait(lambda: self._computes is half)

    def await_network(self, half: Half) -> None:
        """Wait while the other half communicates, and keep computing.

        Raises:
            OtherHalfFailedError: the other one has raised.
        """
        with self._changed:
            self._wait(lambda: self._communicates is not half.other)

    def end(self, half: Half, *, fails: bool = False) -> None:
        """A half has ended: the other one has all turns from here on, or ends too."""
        with self._changed:
            self._ended.add(half)
            self._computes = half.other
            self._free_network(half)
            if fails and self.failed is None:
                self.failed = half
            self._changed.notify_all()

    def _free_network(self, half: Half) -> None:
        if self._communicates is half:
            self._communicates = None
            self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        self._changed.wait_for(is_so)  # it is, as soon as the other half has ended
        if self.failed is not None:
            raise OtherHalfFailedError(f"{self.failed.value} beside it has failed")


class _Marks(Turns):
    """Of a pass that runs alone: notes when it communicates and computes, in turns."""

    def __init__(self, now: Callable[[], Any]) -> None:
        self._now = now
        self.noted: list[Any] = []

    def leave(self, half: Half) -> None:
        if len(self.noted) % 2 == 0:
            self.noted.append(self._now())

    def come_back(self, half: Half) -> None:
        if len(self.noted) % 2:
            self.noted.append(self._now())

    def await_network(self, half: Half) -> None:
        """Note nothing: a forward that B runs again is in one piece."""


@contextmanager
def marked(half: Half, now: Callable[[], T]) -> Iterator[list[T]]:
    """Note where a pass communicates: on an accelerator too, it waits for that there.

    Args:
        half: F, or the backward of one whose points were called within this too.
        now: gives the present, such as an event of the stage's stream.

    Yields:
        When the first communication begins, when it has ended, and so on.
    """
    marks = _Marks(now)
    token = _place.set(_Place(None, half, marks))
    try:
        with torch.autograd.set_multithreading_enabled(False):  # nodes see the place
            yield marks.noted
    finally:
        _place.reset(token)


@dataclass
class _Place:
    """Where the points of a pass find what they need.

    Args:
        network: of an accelerator, for communications; None: they run where they are.
        half: of the pair that runs.
        turns: of that pair; None: the pass runs alone.
    """

    network: NetworkStream | None
    half: Half = Half.FORWARD
    turns: Turns | None = None
    has_points: bool = False

    def communicate(
        self, run: Callable[[], T], tensors: Sequence[Tensor], on_device: bool
    ) -> T:
        """Run the communication of a forward.

        Args:
            run: what communicates.
            tensors: that it reads.
            on_device: some are on an accelerator.
        """
        self.has_points = True
        turns = self.turns
        if turns is not None and self.half is Half.BACKWARD:
            # A recomputed forward: the other half would draw its random numbers.
            turns.await_network(self.half)
            return run()
        if self.network is not None and on_device:
            self.network.begin(tensors)
            with self.network.running():
                result = run()
            event = self.network.event()
            if turns is not None:
                turns.leave(self.half)
                turns.come_back(self.half)
            self.network.end(event, tensors_in(result))
            return result
        if turns is None:
            return run()
        turns.leave(self.half)
        result = run()
        turns.come_back(self.half)
        return result


_place: ContextVar[_Place | None] = ContextVar("overlap_place", default=None)
"""Of the pass that runs in this thread; None where points mean nothing."""


def overlap_point(
    communicate: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call a function that communicates; what a plan has put beside it runs meanwhile.

    A mixture of experts has two such calls in a layer, dispatch and combine:

        tokens = zbpp.overlap_point(self.dispatch, tokens, counts)
        tokens = zbpp.overlap_point(self.combine, self.experts(tokens), counts)

    Outside of a `zbpp.Pipeline`, in plans without pairs of a forward and a backward, in
    evaluations and in compiled layers it is a plain call. Results and gradients are
    those of the plain call, to the last bit.

    Args:
        communicate: waits for the network, and computes little. Its backward must
            communicate by itself, as that of torch's
            ``all_to_all_single_autograd`` does.
        args: its arguments. All tensors that it reads and that need a gradient, or are
            made by the layer, must be among them or ``kwargs``, also in tuples, lists,
            dicts and what torch's pytree knows.
        kwargs: its keyword arguments.

    Returns:
        What the function returns.
    """
    if torch.compiler.is_compiling():
        return communicate(*args, **kwargs)
    tensors = tensors_in((args, kwargs))
    place = _place.get()
    is_marked = place is not None and isinstance(place.turns, _Marks)
    on_device = not is_marked and any(runs_ahead(x.device) for x in tensors)

    def run() -> T:
        given = _handed_on(_CommunicationEnds, (args, kwargs), on_device=on_device)
        result: T = map_tensors(communicate(*given[0], **given[1]), arrived)
        return result

    result = run() if place is None else place.communicate(run, tensors, on_device)
    if any(x.requires_grad for x in tensors):  # else no node would say that it ends
        result = _handed_on(_CommunicationBegins, result, on_device=on_device)
    return result


def _handed_on(node: Any, thing: Any, *, on_device: bool) -> Any:
    """Put a node behind the tensors of a thing that need gradients, one for them all.

    Two nodes with the communication between them run in this order in the backward,
    and no other node between them, as autograd goes by the order of a forward's nodes.
    """
    if not torch.is_grad_enabled():
        return thing
    asked = {id(x): x for x in tensors_in(thing) if x.requires_grad}
    if not asked:
        return thing
    behind = dict(zip(asked, node.apply(on_device, *asked.values()), strict=True))
    return map_tensors(thing, lambda x: behind.get(id(x), x))


class _HandsOn(torch.autograd.Function):
    """Hands tensors on; what its backward does beside that, the kinds of it say."""

    @staticmethod
    def forward(ctx: Any, on_device: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.on_device = on_device
        ctx.set_materialize_grads(False)
        # Returned as they are they would be views, to which nobody may write.
        return tuple([x.detach() for x in tensors])


class _CommunicationEnds(_HandsOn):
    """Stands before a communication: in a backward it is over here, or all issued."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        turns = _turns_of_backward()
        if turns is not None:
            if ctx.on_device:
                turns.leave(Half.BACKWARD)
            turns.come_back(Half.BACKWARD)
        return None, *gradients


class _CommunicationBegins(_HandsOn):
    """Stands behind a communication: in a backward it begins here."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        turns = _turns_of_backward()
        if turns is not None and not ctx.on_device:
            turns.leave(Half.BACKWARD)
        return None, *gradients


def _turns_of_backward() -> Turns | None:
    """The turns of the pair whose B runs in this thread; None: there is none."""
    place = _place.get()
    if place is None or place.half is not Half.BACKWARD:
        return None
    return place.turns


class Overlap:
    """Of one stage: which of its chunks have points, and the stream of its network.

    Args:
        device: of the stage.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.network = NetworkStream(device) if runs_ahead(device) else None
        self._with_points: set[int] = set()

    @contextmanager
    def watching(self, chunk: int) -> Iterator[None]:
        """A forward runs within this, alone or in a pair: learn if it has points."""
        place = _place.get() or _Place(self.network)
        token = _place.set(place)
        try:
            yield
        finally:
            _place.reset(token)
        if place.has_points:
            self._with_points.add(chunk)

    def pair(self, *, forward: int, backward: int) -> "PairedRun | None":
        """Return what runs a pair; None: there is nothing to hide.

        Args:
            forward: chunk of the F.
            backward: chunk of the B, whose forward has run.
        """
        if not self._with_points & {forward, backward}:
            return None
        first = Half.BACKWARD if backward in self._with_points else Half.FORWARD
        return PairedRun(self, first)


class PairedRun:
    """Runs one pair.

    Args:
        overlap: of the stage.
        first: the half that computes first.
    """

    def __init__(self, overlap: Overlap, first: Half) -> None:
        self._overlap = overlap
        self._turns = Turns(first)

    @property
    def failed(self) -> Half | None:
        """The half that has raised, after `run` has."""
        return self._turns.failed

    def run(self, forward: Callable[[], None], backward: Callable[[], T]) -> T:
        """Run both, the backward in a thread of its own; return its result.

        Raises:
            BaseException: what one of them raises; the other one then ends at its next
                point, or at its end.
        """
        results: list[T] = []
        errors: dict[Half, BaseException] = {}
        run_b = self._half(Half.BACKWARD, lambda: results.append(backward()), errors)
        run_f = self._half(Half.FORWARD, forward, errors)
        state = ThreadState(self._overlap.device)
        thread = Thread(target=state.run, args=(run_b,), name="zbpp B", daemon=True)
        thread.start()
        run_f()
        thread.join()
        if self.failed is not None:
            raise errors[self.failed]
        return results[0]

    def _half(
        self,
        half: Half,
        compute: Callable[[], None],
        errors: dict[Half, BaseException],
    ) -> Callable[[], None]:
        """Return the call that runs a half in its turns, and notes what it raises."""
        turns, place = self._turns, _Place(self._overlap.network, half, self._turns)

        def run() -> None:
            token = _place.set(place)
            try:
                turns.begin(half)
                compute()
            except OtherHalfFailedError:
                turns.end(half)
            except BaseException as error:
                errors[half] = error
                turns.end(half, fails=True)
            else:
                turns.end(half)
            finally:
                _place.reset(token)

        return run
