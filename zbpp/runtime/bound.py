"""A program bound to its stage: one call for each instruction, made once.

Where a value comes from and goes to is looked up here, and in no step: it lies in a
`Place` from the call that has it to the one that needs it.

    program   receive A0, 1F0, send A1, ...
    calls     post(A0)  F(A0, A1)  send(A1)  ...
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.profiler import record_function

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    Instruction,
    Pass,
    PassKind,
    Program,
    Receive,
    Send,
    TiedGradient,
    Value,
    input_of,
    output_of,
)
from zbpp.runtime.comm.transport import Transport
from zbpp.runtime.constants import without_constants
from zbpp.runtime.job_times import JobTimes
from zbpp.runtime.kept_tensors import KeptBuffers
from zbpp.runtime.optim.stage_optimizer import StageOptimizer
from zbpp.runtime.parallel.stage import Collectives
from zbpp.runtime.replay import Replay
from zbpp.runtime.stage import Stage
from zbpp.runtime.values import Nested, Tensors

__all__ = ["BoundProgram", "Call", "Place", "StageParts"]


class Call(NamedTuple):
    """One instruction; ``ready`` is None where it waits for no stage in here."""

    ready: Callable[[], bool] | None
    run: Callable[[], object]
    instruction: Instruction


class Place:
    """A value of this stage: here, announced by another stage, or neither."""

    __slots__ = ("is_posted", "tensors", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.tensors: Tensors | None = None
        self.is_posted = False


class StageParts:
    """The parts of a stage that its calls work with.

    Args:
        stage: its chunks.
        transport: its messages.
        optimizer: its share of the optimizer step.
        stage_of: stage of every chunk of the whole model.
        collectives: of its replicas and shards.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        optimizer: StageOptimizer,
        stage_of: Sequence[int],
        collectives: Collectives | None = None,
    ) -> None:
        self.stage = stage
        self.transport = transport
        self.optimizer = optimizer
        self.stage_of = stage_of
        self.collectives = collectives or Collectives({})
        self.times = JobTimes(stage.device)
        self.buffers = KeptBuffers(layer for _, layer in stage.numbered())
        self.replay = Replay(stage, self.buffers) if optimizer.speculates else None
        self.is_profiled = False
        """A profiler records this step: passes leave ranges with their names."""


class BoundProgram:
    """The calls of one program.

    Args:
        parts: of the stage.
        program: of the stage.
        others: what runs instructions that are no passes and move no values.
        training: False runs the forwards without keeping anything for a backward.
    """

    def __init__(
        self,
        parts: StageParts,
        program: Program,
        others: Mapping[type, Callable[[Any], Call]],
        *,
        training: bool,
    ) -> None:
        self._parts = parts
        self._others = others
        self._training = training
        self._places: dict[Value, Place] = {}
        self._received = {i.value for i in program if isinstance(i, Receive)}
        self._made_for = program, parts.transport
        calls = [self._bind(one) for one in program]
        at_check = next((i for i, x in enumerate(program) if isinstance(x, Check)), 0)
        self.before, self.rest = calls[:at_check], calls[at_check:]
        """Calls before the V, and from it on; without one, nothing is before it."""
        self.reduces = any(
            isinstance(one, Collective) and one.kind is CollectiveKind.REDUCE_GRAD
            for one in program
        )
        """Gradients are summed over replicas."""

    def fits(self, program: Program, transport: Transport) -> bool:
        """True if these are the calls of a program, its messages moved so."""
        return self._made_for[0] is program and self._made_for[1] is transport

    def forget(self) -> None:
        """Drop the values that are here; they will be computed once more."""
        for place in self._places.values():
            place.tensors = None

    def posted(self) -> list[Place]:
        """Return the values that are announced and not read yet, as the program is."""
        return [place for place in self._places.values() if place.is_posted]

    def assert_empty(self) -> None:
        """After a step no value may be left over."""
        for place in self._places.values():
            assert place.tensors is None and not place.is_posted, place.value

    def _place(self, value: Value) -> Place:
        return self._places.setdefault(value, Place(value))

    def _bind(self, one: Instruction) -> Call:
        parts = self._parts
        match one:
            case Pass():
                return self._bind_pass(one)
            case Send(TiedGradient() as tied, peer):
                send = parts.stage.ties.send
                return Call(None, partial(send, tied, parts.transport, peer), one)
            case Receive(TiedGradient() as tied, peer):
                post = parts.stage.ties.post
                return Call(None, partial(post, tied, parts.transport, peer), one)
            case Send(Value() as value, peer):
                return Call(None, _SendCall(parts, self._place(value), peer), one)
            case Receive(Value() as value, peer):
                return Call(None, _PostCall(parts, self._place(value), peer), one)
        return self._others[type(one)](one)

    def _bind_pass(self, job: Pass) -> Call:
        parts, n_chunks = self._parts, len(self._parts.stage_of)
        reads, writes = input_of(job, n_chunks), output_of(job, n_chunks)
        source = None if reads is None else self._place(reads)
        target = None if writes is None else self._place(writes)
        run = _PassCall(parts, job, self._compute(job), source, target)
        ready = None
        if parts.transport.is_local and reads in self._received:
            ready = partial(parts.transport.ready, reads)
        return Call(ready, run, job)

    def _compute(self, job: Pass) -> Callable[[Tensors | None], Tensors | None]:
        stage, replay = self._parts.stage, self._parts.replay
        where = (job.chunk, job.microbatch)
        match job.kind:
            case PassKind.F if not self._training:
                return partial(stage.predict, *where)
            case PassKind.F if replay is not None:
                return partial(replay.run, job, partial(stage.forward, *where))
            case PassKind.F:
                return partial(stage.forward, *where)
            case PassKind.B:
                return partial(stage.backward_input, *where)
            case PassKind.BW:
                return partial(stage.backward, *where)
            case PassKind.W:
                return partial(stage.backward_weight, *where)


class _PassCall:
    """Take what a pass reads, compute, keep what it writes."""

    __slots__ = ("_compute", "_is_backward", "_job", "_parts", "_reads", "_writes")

    def __init__(
        self,
        parts: StageParts,
        job: Pass,
        compute: Callable[[Tensors | None], Tensors | None],
        reads: Place | None,
        writes: Place | None,
    ) -> None:
        self._parts = parts
        self._job = job
        self._compute = compute
        self._reads = reads
        self._writes = writes
        self._is_backward = job.kind is not PassKind.F

    def __call__(self) -> None:
        parts, job, reads = self._parts, self._job, self._reads
        tensors = None
        if reads is not None:
            if reads.is_posted:
                reads.is_posted = False
                tensors = parts.transport.receive(reads.value, job)
                if type(tensors) is Nested:
                    tensors = parts.stage.constants.fill(tensors, job.microbatch)
            else:
                tensors, reads.tensors = reads.tensors, None
                assert tensors is not None, f"nobody has computed the {reads.value}"
        if self._is_backward:
            parts.optimizer.before_gradients()
        times = parts.times
        start = times.now()
        if parts.is_profiled:
            with record_function(str(job)):
                result = self._compute(tensors)
        else:
            result = self._compute(tensors)
        times.marks.append((job, start, times.now()))
        if self._writes is not None:
            self._writes.tensors = result


class _SendCall:
    """Hand a value to the transport."""

    __slots__ = ("_parts", "_peer", "_place")

    def __init__(self, parts: StageParts, place: Place, peer: int) -> None:
        self._parts = parts
        self._place = place
        self._peer = peer

    def __call__(self) -> None:
        parts, place = self._parts, self._place
        tensors, place.tensors = place.tensors, None
        assert tensors is not None, f"nobody has computed the {place.value}"
        if type(tensors) is Nested:
            chunk = place.value.chunk
            tensors = without_constants(tensors, chunk, self._peer, parts.stage_of)
        parts.transport.send(place.value, tensors, self._peer)


class _PostCall:
    """Announce to the transport that a value will come."""

    __slots__ = ("_parts", "_peer", "_place")

    def __init__(self, parts: StageParts, place: Place, peer: int) -> None:
        self._parts = parts
        self._place = place
        self._peer = peer

    def __call__(self) -> None:
        self._place.is_posted = True
        self._parts.transport.post(self._place.value, self._peer)
