"""Runs one stage's program: a table from instructions to handlers, and one loop.

    instruction    handler            what it does
    F, B, BW, W    PassHandler        take what it reads, compute, keep what it writes
    OVERLAP_F_B    PairHandler        an F and a B or BW: in turns where their layers
                                      communicate (`zbpp.runtime.overlap`), or in a row
    Segment        PassSegment ..     a pass up to its next communication
    Receive        PostReceive        announce a value to the transport
    Send           SendValue          hand a value to the transport
    UNSHARD ..     RunCollective      collectives of the processes of the same stage
    AddTied        AddTiedGradients   wait for other stages' gradients, add them
    Reduce         StartReduction     start the sum of norms and losses over all stages
    O              TakeStep           wait for that sum, clip, step or skip; or step
                                      speculatively
    V              ValidateStep       validate that step; if it is invalid, what came
                                      before runs once more

The executor knows jobs and messages, never modes. A program is bound once: each of its
instructions becomes a handler that knows the `ValueSlot` of each value, so that no step
looks anything up. A new kind of job needs one class and its row in `HANDLERS`.

Every job leaves its times (`zbpp.runtime.job_times`), and under a profiler a range with
its name. The times of O and V are those of their work, without the wait for the sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.profiler import record_function

from zbpp.core import (
    AddTied,
    Check,
    Collective,
    CollectiveKind,
    Instruction,
    Job,
    Pair,
    PairKind,
    Pass,
    PassKind,
    Program,
    Receive,
    Reduce,
    Segment,
    Send,
    Step,
    TiedGradient,
    Value,
    input_of,
    of_first_microbatches,
    output_of,
    passes_in,
)
from zbpp.core.jobs import StageKind
from zbpp.runtime.comm.transport import Expected, Opening, Transport
from zbpp.runtime.error_notes import note_pass
from zbpp.runtime.job_times import JobTimes, Timed
from zbpp.runtime.optim.stage_optimizer import StageOptimizer
from zbpp.runtime.overlap import Overlap
from zbpp.runtime.parallel.stage import Collectives
from zbpp.runtime.replay import Replay
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.collectives import is_broken
from zbpp.runtime.values import Tensors

__all__ = ["HANDLERS", "BoundProgram", "Executor", "Handler", "drive"]


class ValueSlot:
    """A value of this stage: computed here, announced by another stage, or neither."""

    __slots__ = ("expected", "tensors", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.tensors: Tensors | None = None
        self.expected: Expected | None = None

    def take(self, job: Job) -> Tensors:
        """Return the tensors, and forget them; ``job`` waits for another stage's."""
        if self.expected is not None:
            expected, self.expected = self.expected, None
            return expected.receive(job)
        tensors, self.tensors = self.tensors, None
        assert tensors is not None, f"nobody has computed the {self.value}"
        return tensors


class BoundProgram:
    """The handlers of one program.

    Args:
        executor: runs the program.
        program: of the executor's stage.
        n: the first micro-batches, which alone run; None: all.
        training: False runs the forwards without keeping anything for a backward.
    """

    def __init__(
        self,
        executor: "Executor",
        program: Program,
        n: int | None,
        *,
        training: bool,
    ) -> None:
        self.executor = executor
        self.training = training
        self._made_for = program, executor.transport
        if n is not None:
            program = of_first_microbatches(program, n)
        self.received = {x.value for x in program if isinstance(x, Receive)}
        self._slots: dict[Value, ValueSlot] = {}
        self.sent_early: dict[Value, list[SendValue]] = {}
        """Values that a handler sends itself, and where it finds how."""
        self.before: list[Handler] = []
        """Handlers before the V; empty if the program has none."""
        self.check: ValidateStep | None = None
        self.rest: list[Handler] = []
        """Handlers after the V; all if the program has none."""
        self.overlaps = any(isinstance(x, Pair | Segment) for x in program)
        """Passes stop where they communicate."""
        self._stopping: dict[Pass, PassHandler] = {}
        for instruction in program:
            handler = HANDLERS[kind_of_instruction(instruction)](self, instruction)
            if isinstance(handler, ValidateStep):
                self.check, self.before, self.rest = handler, self.rest, []
            elif isinstance(handler, SendValue) and handler.value in self.sent_early:
                self.sent_early[handler.value].append(handler)
            else:
                self.rest.append(handler)
        self.reduces = any(
            isinstance(x, Collective) and x.kind is CollectiveKind.REDUCE_GRAD
            for x in program
        )
        """Gradients are summed over replicas."""
        self.has_passes = any(isinstance(x, Pass | Segment) for x in program)

    def fits(self, program: Program, transport: Transport) -> bool:
        """True if these are the handlers of a program with its messages moved so."""
        return self._made_for[0] is program and self._made_for[1] is transport

    def slot(self, value: Value) -> ValueSlot:
        """Return the place of a value."""
        return self._slots.setdefault(value, ValueSlot(value))

    def stopping(self, job: Pass) -> "PassHandler":
        """Return the one handler of a pass of which several instructions run a part."""
        if job not in self._stopping:
            handler = HANDLERS[job.kind](self, job)
            assert isinstance(handler, PassHandler)
            self._stopping[job] = handler
        return self._stopping[job]

    def forget(self) -> None:
        """Drop the values that were computed here; they will be computed once more."""
        for slot in self._slots.values():
            slot.tensors = None

    def posted(self) -> list[ValueSlot]:
        """Return the values that are announced and not read yet, in program order."""
        return [slot for slot in self._slots.values() if slot.expected is not None]

    def assert_empty(self) -> None:
        """After a step no value may be left over."""
        for slot in self._slots.values():
            assert slot.tensors is None and slot.expected is None, slot.value


class Handler:
    """One instruction of a bound program.

    Args:
        bound: the program.
        instruction: one of its instructions.
    """

    waits: bool = False
    """True where it may wait for another stage of this process: ask `ready` first."""

    def __init__(self, bound: BoundProgram, instruction: Any) -> None:
        self.executor = bound.executor
        self.instruction = instruction

    def ready(self) -> bool:
        """True if `run` goes on without another stage of this process."""
        return True

    def run(self) -> None:
        """Do it."""
        raise NotImplementedError


class PassHandler(Handler):
    """A pass: where the value that it reads comes from, and its result goes to.

    Args:
        bound: the program.
        instruction: the pass.
        compute: gives the result of the pass from what it reads.
    """

    instruction: Pass

    def __init__(
        self,
        bound: BoundProgram,
        instruction: Pass,
        compute: Callable[[Tensors | None], Tensors | None],
    ) -> None:
        super().__init__(bound, instruction)
        n_chunks = len(self.executor.stage_of)
        reads = input_of(instruction, n_chunks)
        writes = output_of(instruction, n_chunks)
        self._input = None if reads is None else bound.slot(reads)
        self._output = None if writes is None else bound.slot(writes)
        self._compute = compute
        self.waits = self.executor.transport.is_local and reads in bound.received

    def ready(self) -> bool:
        """True if the value that it reads is there."""
        assert self._input is not None and self._input.expected is not None
        return self._input.expected.ready()

    def run(self) -> None:
        """Take what the pass reads, compute, keep the result."""
        job, slot = self.instruction, self._input
        inputs = None if slot is None else slot.take(job)
        with Timed(self.executor.times, job):
            self._keep(self._compute(inputs))

    def begin(self, overlap: Overlap) -> None:
        """Take what the pass reads; from here on ``overlap`` lets it compute."""
        job, slot = self.instruction, self._input
        inputs = None if slot is None else slot.take(job)
        overlap.begin(job, lambda: self._keep(self._compute(inputs)))

    def _keep(self, result: Tensors | None) -> None:
        """Keep what the pass has computed for the one that reads it."""
        if self._output is not None:
            self._output.tensors = result


def _bind_pass(bound: BoundProgram, job: Pass) -> PassHandler:
    """Bind a pass to the method of the stage that computes it."""
    executor, stage = bound.executor, bound.executor.stage
    methods: dict[PassKind, Callable[..., Tensors | None]] = {
        PassKind.F: stage.forward if bound.training else stage.predict,
        PassKind.B: stage.backward_input,
        PassKind.BW: stage.backward,
        PassKind.W: stage.backward_weight,
    }
    # no function of ours: each would be one more frame above a layer
    compute = partial(methods[job.kind], job.chunk, job.microbatch)
    is_forward = job.kind is PassKind.F and bound.training
    if is_forward and (bound.overlaps or executor.optimizer.speculates):
        overlap = executor.overlap if bound.overlaps else None
        compute = partial(_run_watched, executor.replay, overlap, job, compute)
    return PassHandler(bound, job, compute)


def _run_watched(
    replay: Replay,
    overlap: Overlap | None,
    job: Pass,
    forward: Callable[[Tensors | None], Tensors | None],
    inputs: Tensors | None,
) -> Tensors | None:
    """Run an F that may run once more, or whose chunk may have overlap points."""
    replay.before(job)
    with _NOTHING if overlap is None else overlap.watching(job.chunk):
        return forward(inputs)


class PairHandler(Handler):
    """A forward and a backward of other micro-batches.

    Where their layers have points, they take turns (`zbpp.runtime.overlap`), and the
    times are those of the pair; else they run one after the other. The forward's output
    leaves as soon as it is there: the stage that reads it must not wait for the
    backward.
    """

    def __init__(self, bound: BoundProgram, instruction: Pair) -> None:
        super().__init__(bound, instruction)
        self._passes = [bound.stopping(job) for job in passes_in(instruction)]
        self.waits = any(handler.waits for handler in self._passes)
        self._sends: list[SendValue] = []
        output = output_of(instruction.forward, len(self.executor.stage_of))
        if output is not None:
            bound.sent_early[output] = self._sends

    def ready(self) -> bool:
        """True if both passes have what they read."""
        return all(x.ready() for x in self._passes if x.waits)

    def run(self) -> None:
        """Run both; the forward's output is handed on behind it."""
        pair, overlap = self.instruction, self.executor.overlap
        if overlap is None or not any(
            overlap.has_points(job.chunk) for job in passes_in(pair)
        ):
            self._run_in_a_row()
        else:
            self._run_in_turns(overlap)
        self.instruction = pair

    def _run_in_a_row(self) -> None:
        forward, backward = self._passes
        for handler in (forward, *self._sends, backward):
            self.instruction = handler.instruction  # errors name the pass
            handler.run()

    def _run_in_turns(self, overlap: Overlap) -> None:
        """Begin both, and let them take turns."""
        pair: Pair = self.instruction
        for handler in self._passes:
            self.instruction = handler.instruction
            handler.begin(overlap)
        with Timed(self.executor.times, pair):
            self._take_turns(pair, overlap)

    def _take_turns(self, pair: Pair, overlap: Overlap) -> None:
        """Run both up to their next points in turns; B first, if it has any."""
        turns = [pair.forward, pair.backward]
        if overlap.has_points(pair.backward.chunk):
            turns.reverse()
        while turns:
            for job in list(turns):
                overlap.go_on(job)
                if not overlap.is_open(job):
                    turns.remove(job)
                    if job is pair.forward:
                        self._send()

    def _send(self) -> None:
        for send in self._sends:
            send.run()


class PassSegment(Handler):
    """A segment of an F, B or BW; one whose chunk has no points runs in its first."""

    instruction: Segment

    def __init__(self, bound: BoundProgram, instruction: Segment) -> None:
        super().__init__(bound, instruction)
        self._pass = bound.stopping(instruction.part.of)
        self.waits = instruction.begins and self._pass.waits

    def ready(self) -> bool:
        """True if the value that the pass reads is there."""
        return self._pass.ready()

    def run(self) -> None:
        """Begin the pass, or let it go on from where it stands."""
        segment, executor = self.instruction, self.executor
        overlap, job = executor.overlap, segment.part.of
        if segment.begins:
            if overlap is None or not overlap.has_points(job.chunk):
                self._pass.run()
                return
            self._pass.begin(overlap)
        if overlap is None or not overlap.is_open(job):
            return
        go_on = overlap.go_on if segment.left else overlap.finish
        with Timed(executor.times, segment.part):
            go_on(job)


class WeightSegment(Handler):
    """A part of a W; the last one does what is left of it."""

    instruction: Segment

    def run(self) -> None:
        """Compute gradients of the weights, of a B that may still run."""
        executor, segment = self.executor, self.instruction
        stage, overlap, w = executor.stage, executor.overlap, segment.part.of
        stops = overlap is not None and overlap.has_points(w.chunk)
        if not segment.left:
            if overlap is not None:
                overlap.finish(Pass(PassKind.B, w.chunk, w.microbatch))
            job = segment.part if stops else w
            with Timed(executor.times, job):
                stage.backward_weight(w.chunk, w.microbatch)
        elif stops:
            with Timed(executor.times, segment.part):
                stage.begin_weight(w.chunk, w.microbatch, segment.left + 1)


class SendValue(Handler):
    """The send of an activation or a gradient."""

    def __init__(self, bound: BoundProgram, instruction: Send) -> None:
        super().__init__(bound, instruction)
        assert isinstance(instruction.value, Value)
        self.value = instruction.value
        self._slot = bound.slot(self.value)

    def run(self) -> None:
        """Hand the value to the transport."""
        slot, peer = self._slot, self.instruction.peer
        self.executor.transport.send(slot.value, slot.take(self.instruction), peer)


class PostReceive(Handler):
    """The receive of an activation or a gradient."""

    def __init__(self, bound: BoundProgram, instruction: Receive) -> None:
        super().__init__(bound, instruction)
        assert isinstance(instruction.value, Value)
        self._slot = bound.slot(instruction.value)

    def run(self) -> None:
        """Announce to the transport that the value will come."""
        slot, peer = self._slot, self.instruction.peer
        slot.expected = self.executor.transport.post(slot.value, peer)


class DropReceived(Handler):
    """A value that was announced before an invalid step was found so."""

    waits = True

    def __init__(self, bound: BoundProgram, instruction: Check, slot: ValueSlot):
        super().__init__(bound, instruction)
        assert slot.expected is not None
        self._expected, slot.expected = slot.expected, None

    def ready(self) -> bool:
        """True if the value is there."""
        return self._expected.ready()

    def run(self) -> None:
        """Take the value out of its channel."""
        self._expected.receive(self.instruction)


class SendTiedGradient(Handler):
    """The send of a chunk's gradients of a parameter that several chunks hold."""

    def run(self) -> None:
        """Hand the gradients to the transport."""
        executor, send = self.executor, self.instruction
        executor.stage.ties.send(send.value, executor.transport, send.peer)


class PostTiedGradient(Handler):
    """The receive of another stage's gradients of such a parameter."""

    def run(self) -> None:
        """Announce to the transport that they will come."""
        executor, receive = self.executor, self.instruction
        executor.stage.ties.post(receive.value, executor.transport, receive.peer)


class AddTiedGradients(Handler):
    """The sum of the gradients of such parameters."""

    waits = True

    def ready(self) -> bool:
        """True if the other stages' gradients are there."""
        return self.executor.stage.ties.ready()

    def run(self) -> None:
        """Wait for the other stages' gradients, and add them."""
        executor, ties = self.executor, self.executor.stage.ties
        job = Step(self.instruction.stage)
        received = ties.receive(job)
        executor.times.begin_norms()
        ties.add(received)
        executor.collectives.sum_tied()


class RunCollective(Handler):
    """A collective of the processes that hold the same chunk."""

    def run(self) -> None:
        """Run it; those that go on beside other jobs get their times as a whole."""
        executor, job = self.executor, self.instruction
        times, collectives = executor.times, executor.collectives
        start = times.now()
        with record_function(str(job)) if times.is_profiled else _NOTHING:
            collectives.run(job)
        if job.kind is CollectiveKind.REDUCE_WAIT:
            sums = Collective(CollectiveKind.REDUCE_GRAD, job.chunk)
            began = collectives.began.pop(job.chunk, start)
            times.marks.append((sums, began, times.now()))
        elif job.kind is CollectiveKind.UNSHARD:
            times.marks.append((job, start, times.now()))


class StartReduction(Handler):
    """The start of the sum over all stages that the step waits for."""

    def run(self) -> None:
        """Leave each gradient where it belongs, and start the sum."""
        executor = self.executor
        executor.collectives.end_sums(executor.transport.add_over_replicas)
        executor.times.begin_norms()
        executor.optimizer.reduce(executor.transport)
        executor.times.end_norms()


class TakeStep(Handler):
    """O."""

    waits = True

    def ready(self) -> bool:
        """True if the step waits for no stage of this process."""
        return self.executor.optimizer.ready()

    def run(self) -> None:
        """Wait for the sum, unless the step is speculative, and step."""
        optimizer, job = self.executor.optimizer, self.instruction
        if not optimizer.steps_at_once:
            optimizer.wait(job)
        with Timed(self.executor.times, job):
            optimizer.step(job)


class ValidateStep(Handler):
    """V."""

    waits = True
    is_invalid = False
    """The last step was speculative and invalid, on all stages."""

    def ready(self) -> bool:
        """True if the validation waits for no stage of this process."""
        return self.executor.optimizer.ready_to_validate()

    def run(self) -> None:
        """Settle the last step."""
        optimizer, job = self.executor.optimizer, self.instruction
        optimizer.wait(job)
        with Timed(self.executor.times, job):
            self.is_invalid = optimizer.validate(job)


HANDLERS: Mapping[Any, Callable[[BoundProgram, Any], Handler]] = {
    **dict.fromkeys(PassKind, _bind_pass),
    PairKind.FB: PairHandler,
    (Segment, PassKind.F): PassSegment,
    (Segment, PassKind.B): PassSegment,
    (Segment, PassKind.BW): PassSegment,
    (Segment, PassKind.W): WeightSegment,
    (Send, Value): SendValue,
    (Receive, Value): PostReceive,
    (Send, TiedGradient): SendTiedGradient,
    (Receive, TiedGradient): PostTiedGradient,
    **dict.fromkeys(CollectiveKind, RunCollective),
    AddTied: AddTiedGradients,
    Reduce: StartReduction,
    StageKind.STEP: TakeStep,
    StageKind.CHECK: ValidateStep,
}
"""Makers of handlers, by the kind of the instruction."""


def kind_of_instruction(instruction: Instruction) -> Any:
    """Return the key of an instruction in `HANDLERS`."""
    match instruction:
        case Send(value) | Receive(value):
            return type(instruction), type(value)
        case Segment(part):
            return Segment, part.kind
        case Reduce() | AddTied():
            return type(instruction)
    return instruction.kind


class Executor:
    """Runs programs on one stage.

    Args:
        stage: the stage's chunks.
        transport: moves the stage's messages.
        optimizer: the stage's share of the optimizer step.
        stage_of: stage of every chunk of the whole model.
        collectives: of the stage's replicas and shards; None: it has none.
        times: note when jobs run; None: by a clock that fits the stage's device.
        overlap: lets passes stop at their points; None: they run in a row.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        optimizer: StageOptimizer,
        *,
        stage_of: Sequence[int],
        collectives: Collectives | None = None,
        times: JobTimes | None = None,
        overlap: Overlap | None = None,
    ) -> None:
        self.stage = stage
        self.transport = transport
        self.optimizer = optimizer
        self.stage_of = stage_of
        self.collectives = collectives or Collectives({})
        self.times = times or JobTimes(stage.device)
        self.overlap = overlap
        self.replay = Replay(stage)
        self.opening: Opening | None = Opening(1)
        """Begins the messages of the next step; None: its shapes are known."""
        self._is_part = False
        self.n_filled: int | None = None
        """Micro-batches that have samples in the batch that was last; None: all."""
        self._bound: dict[tuple[bool, int | None], BoundProgram] = {}
        """By whether it trains, and by micro-batches if it leaves some out."""
        self._progress = self.collectives.progress(stage.chunks.values())

    def use_network(self, transport: Transport, collectives: Collectives) -> None:
        """Let messages and collectives take other ways from the next step on."""
        self.transport = transport
        self.collectives = collectives

    def begin(
        self,
        *,
        n_microbatches: int,
        n_inputs: int | None = None,
        n_targets: int | None = None,
        n_filled: int | None = None,
        training: bool = True,
        is_part: bool = False,
        **step: Any,
    ) -> None:
        """Begin a step or an evaluation: take the micro-batches that the stage reads.

        Args:
            n_microbatches: of the step.
            n_inputs: samples of the inputs, where they were cut here.
            n_targets: samples of the targets, where they were cut here.
            n_filled: micro-batches that have samples, where the batch is read.
            training: it is a step.
            is_part: it is one of several parts of a step, which leaves no times.
            step: see `Stage.begin`.
        """
        self._is_part = is_part
        self.stage.begin(n_microbatches=n_microbatches, **step)
        self.opening = Opening(
            n_microbatches,
            self.stage.inputs,
            n_inputs,
            n_targets,
            n_filled,
            training,
        )

    def begin_end(self) -> None:
        """Begin what a step of several parts does behind them all."""
        self.opening = None

    def run(self, program: Program, *, training: bool = True) -> Iterator[None]:
        """Run a program; yield where another stage of this process must go first.

        Args:
            program: this stage's instructions.
            training: False runs the forwards without keeping anything for a backward.

        Raises:
            PeerError, ShapeError: from the transport.
            Exception: whatever the model raises, with a note that names the job.
        """
        n, is_whole = self.n_filled, True
        if n is not None and self.transport.peers.n == 1:
            is_whole = n == self.stage.n_microbatches
        bound = self._bind(program, None if is_whole else n, training=training)
        self.times.begin(training=training and is_whole and not self._is_part)
        try:
            for handlers in self._in_order(bound) if training else [bound.rest]:
                for handler in handlers:
                    if handler.waits:
                        while not handler.ready():
                            self._finish_forwards()
                            yield
                    try:
                        handler.run()
                    except Exception as error:
                        self._explain(error, handler.instruction)
                        raise
        finally:
            if self.overlap is not None:
                self.overlap.stop()
        self.collectives.end()
        bound.assert_empty()
        self.stage.assert_empty()
        self.transport.end()

    def _bind(self, program: Program, n: int | None, *, training: bool) -> BoundProgram:
        """Bind a program, or return it as it was bound before.

        Args:
            program: of this stage.
            n: the first micro-batches, which alone have samples; None: all have.
            training: it is that of a step.
        """
        bound = self._bound.get((training, n))
        if bound is None or not bound.fits(program, self.transport):
            bound = BoundProgram(self, program, n, training=training)
            self._bound[training, n] = bound
        return bound

    def _in_order(self, bound: BoundProgram) -> Iterator[Sequence[Handler]]:
        """Yield the handlers of a training step; those before an invalid V twice."""
        self.optimizer.begin_step()
        self.replay.begin(may_rewind=self.optimizer.may_replay)
        yield bound.before
        if bound.check is not None:
            yield [bound.check]
            if bound.check.is_invalid:
                yield self._rewind(bound, bound.check)
                yield bound.before
        self.replay.decide()
        self.optimizer.begin_backward()
        if bound.has_passes and not self.stage.first:
            self.stage.ties.begin()
        if bound.reduces:
            self.stage.watch_weights(self._progress)
        yield bound.rest

    def _finish_forwards(self) -> None:
        """Leave no F open while another stage draws from the same generators."""
        if self.overlap is not None:
            try:
                self.overlap.finish_forwards()
            except Exception as error:
                assert self.overlap.failed is not None, "an open pass has failed"
                self._explain(error, self.overlap.failed)
                raise

    def _rewind(self, bound: BoundProgram, check: ValidateStep) -> list[Handler]:
        """The speculative step is invalid: go back to where this step began.

        All stages do so together, so what has been sent before is sent again; what has
        come of it and was not read yet is invalid as well.
        """
        bound.forget()
        self.collectives.rewind()
        self.replay.rewind()
        posted = bound.posted()
        return [DropReceived(bound, check.instruction, slot) for slot in posted]

    def _explain(self, error: Exception, instruction: Instruction) -> None:
        """Note where an error was raised.

        Raises:
            PeerError: it is that of a collective which another process has not ended.
        """
        if self.overlap is not None and self.overlap.failed is not None:
            instruction = self.overlap.failed  # its error comes up in any other's turn
        elif isinstance(instruction, Segment):
            instruction = instruction.part.of
        if isinstance(error, RuntimeError) and is_broken(error):
            raise self.transport.lost_peer(str(instruction), error) from error
        error.add_note(f"in {instruction}")
        if isinstance(instruction, Pass):
            chunk = self.stage.chunks[instruction.chunk]
            note_pass(error, instruction, list(chunk.numbered()), chunk.name_of)

    def settle(self) -> None:
        """Leave the state after the last whole step; the caller may then write to it.

        Raises:
            Exception: see `StageOptimizer.settle`.
        """
        self.optimizer.settle()


_NOTHING = nullcontext()


def drive(
    executors: Mapping[int, Executor],
    programs: Sequence[Program] | Mapping[int, Program],
    *,
    training: bool = True,
) -> None:
    """Run the programs of this process's stages, each as far as it can in turn.

    Args:
        executors: by stage; all stages, or the only one of this process.
        programs: by stage.
        training: False runs the forwards alone.
    """
    random = next(iter(executors.values())).stage.random
    may_draw = any(executor.stage.may_draw for executor in executors.values())
    with random.borrowed(training=training, may_draw=may_draw):
        _drive(executors, programs, training=training)


def _drive(
    executors: Mapping[int, Executor],
    programs: Sequence[Program] | Mapping[int, Program],
    *,
    training: bool,
) -> None:
    runs = []
    for stage, executor in executors.items():
        executor.n_filled = executor.transport.begin(executor.opening)
        runs.append(executor.run(programs[stage], training=training))
    while runs:
        runs = [run for run in runs if next(run, _DONE) is not _DONE]


_DONE = object()
