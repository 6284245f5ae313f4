"""Runs one stage's program: one loop, and a function for each kind of instruction.

    F, B, BW, W    take what the pass reads, compute, keep what it writes
    OVERLAP_F_B    an F and a B or BW: interleaved where their layers communicate
                   (`zbpp.runtime.overlap`), or one after the other
    Segment        a pass up to its next communication
    Receive, Send  announce a value to the transport, or hand one over
    UNSHARD ..     collectives of the processes of the same stage
    AddTied        wait for other stages' gradients, and add them
    Reduce         start the sum of norms and losses over all stages
    O              wait for that sum, clip, step or skip; or step speculatively
    V              validate that step; if it is invalid, what came before runs once more

The executor knows jobs and messages, never modes. What a stage has computed, or other
stages have announced, waits in a dict until it is read. A new kind of job needs one
function and its row in `HANDLERS`.

Every job leaves its times (`zbpp.runtime.job_times`), and under a profiler a range with
its name. The times of O and V are those of their work, without the wait for the sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

from torch.profiler import record_function

from zbpp.core import (
    AddTied,
    Check,
    Collective,
    CollectiveKind,
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
    at_check,
    input_of,
    output_of,
    passes_in,
)
from zbpp.core.jobs import StageKind
from zbpp.core.program import Message
from zbpp.runtime.comm.transport import Expected, Transport
from zbpp.runtime.error_notes import note_pass
from zbpp.runtime.job_times import JobTimes, Timed
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.optim.stage_optimizer import StageOptimizer
from zbpp.runtime.overlap import Overlap
from zbpp.runtime.parallel.sums import Collectives
from zbpp.runtime.replay import Replay
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.collectives import is_broken
from zbpp.runtime.values import Tensors

_NOTHING = nullcontext()


@lru_cache(None)
def _ends(job: Pass, n_chunks: int) -> tuple[Value | None, Value | None]:
    """The values that a pass takes from another chunk, and has for another one."""
    return input_of(job, n_chunks), output_of(job, n_chunks)


class _Drop(NamedTuple):
    """Take a value of an invalid step out of its channel."""

    expected: Expected

    def __str__(self) -> str:
        return "V"


class Executor:
    """Runs programs on one stage; ``stage_of`` has the stage of every chunk."""

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
        self.overlap = overlap or Overlap(stage.device, stops=False)
        self.replay = Replay(stage)
        self.batch: MicroBatches | None = stage.batch
        """Of the next call; None at the end of a step in parts."""
        self._compute: dict[PassKind, Callable[..., Tensors | None]] = {}
        """Functions that compute a pass of each kind in the program that runs."""
        self._values: dict[Value, Tensors] = {}
        """Computed here, and not read yet."""
        self._expected: dict[Message, Expected] = {}
        """Announced by other stages, and not read yet."""
        self._early: dict[Value | None, Send] = {}
        """Sends of values that forwards of pairs will have, or have sent."""
        self._half: Pass | None = None
        """The pass that runs or begins, of a pair."""
        self._may_stop = False
        """Passes of the program that runs may stop at their points."""
        self._is_invalid = False
        """V has found the last step invalid, on all stages."""

    # ---- Steps.

    def begin(self, batch: MicroBatches) -> None:
        """Begin a step or an evaluation."""
        self.batch = batch
        self.stage.begin(batch)

    def run(self, program: Program, *, training: bool = True) -> Iterator[None]:
        """Run a program; yield where another stage of this process must go first."""
        self.times.begin(training=training and not self.stage.batch.is_part)
        self._compute = {PassKind.F: self.stage.predict}
        waits = WAITS if self.transport.is_local else {}
        try:
            for instruction in self._in_order(program) if training else program:
                kind = getattr(instruction, "kind", None) or type(instruction)
                try:
                    if kind in waits:
                        while not waits[kind](self, instruction):
                            self.overlap.finish_forwards()  # others draw numbers
                            yield
                    HANDLERS[kind](self, instruction)
                except Exception as error:
                    self._explain(error, instruction)
                    raise
        finally:
            self.overlap.stop()
        if self._values or self._expected:
            names = ", ".join(map(str, [*self._values, *self._expected]))
            raise RuntimeError(f"nothing has read the {names}: the program is wrong")
        self.collectives.drop()
        self.stage.end()
        self.transport.end()

    def _in_order(self, program: Program) -> Iterator[Any]:
        """Yield the instructions of a step; those before an invalid V twice."""
        stage, kinds = self.stage, set(map(type, program))
        self._may_stop = self.overlap.stops and not kinds.isdisjoint((Pair, Segment))
        self._compute = {
            PassKind.F: self._forward,
            PassKind.B: stage.backward_input,
            PassKind.BW: stage.backward,
            PassKind.W: stage.backward_weight,
        }
        if Pair in kinds:
            forwards = [x.forward for x in program if isinstance(x, Pair)]
            values = {_ends(job, len(self.stage_of))[1] for job in forwards}
            sends = (x for x in program if isinstance(x, Send))
            self._early = {x.value: x for x in sends if x.value in values}
        self.optimizer.begin_step()
        self.replay.begin(may_rewind=self.optimizer.may_replay)
        before, rest = at_check(program)
        yield from before
        if Check in kinds:
            yield rest[0]
            if self._is_invalid:
                yield from self._rewind()
                yield from before
            rest = rest[1:]
        self.replay.decide()
        if not self._may_stop:
            self._compute[PassKind.F] = stage.forward
        self.optimizer.begin_backward()
        if not stage.batch.first and not kinds.isdisjoint((Pass, Segment)):
            stage.ties.begin()
        if Collective in kinds:
            stage.watch_weights(self.collectives.chunks)
        yield from rest

    def _rewind(self) -> list[_Drop]:
        """The speculative step is invalid: go back to where this step began.

        All stages do so together, so what has been sent before is sent again; what has
        come of it and was not read yet is invalid as well.
        """
        self._values.clear()
        self.collectives.drop()
        self.replay.rewind()
        dropped = [_Drop(expected) for expected in self._expected.values()]
        self._expected.clear()
        return dropped

    # ---- Passes.

    def _has_inputs(self, job: Pass) -> bool:
        value, _ = _ends(job, len(self.stage_of))
        expected = None if value is None else self._expected.get(value)
        return expected is None or expected.ready()

    def _ready_pass(self, job: Pass) -> Callable[[], None]:
        """Take what a pass reads; return what computes it, and keeps what it writes."""
        reads, writes = _ends(job, len(self.stage_of))
        inputs: Tensors | None = None
        if job.kind is PassKind.F:
            self.optimizer.host.arrive(job.chunk)
        if reads is not None:
            sent = self._expected.pop(reads, None)
            inputs = self._values.pop(reads) if sent is None else sent.receive(job)

        def compute() -> None:
            result = self._compute[job.kind](job.chunk, job.microbatch, inputs)
            if writes is not None and result is not None:
                self._values[writes] = result

        return compute

    def _run_pass(self, job: Pass) -> None:
        compute = self._ready_pass(job)
        with Timed(self.times, job):
            compute()

    def _forward(self, chunk: int, microbatch: int, inputs: Tensors | None) -> Tensors:
        """An F that may run once more, or whose chunk may have overlap points."""
        self.replay.before(chunk, microbatch)
        with self.overlap.watching(chunk) if self._may_stop else _NOTHING:
            return self.stage.forward(chunk, microbatch, inputs)

    def _run_pair(self, pair: Pair) -> None:
        """Run both passes, interleaved if their layers have points, else in a row.

        The forward's output leaves as soon as it is there: the stage that reads it must
        not wait for the backward. The times of turns are those of the pair.
        """
        turns, overlap = list(passes_in(pair)), self.overlap
        is_interleaved = any(overlap.has_points(job.chunk) for job in turns)
        for job in turns:
            self._half = job
            if is_interleaved:
                overlap.begin(job, self._ready_pass(job))
            else:
                HANDLERS[job.kind](self, job)
                self._send_early(job)
        self._half = None
        if not is_interleaved:
            return
        if overlap.has_points(pair.backward.chunk):
            turns.reverse()
        with Timed(self.times, pair):
            while turns:
                for job in list(turns):
                    overlap.go_on(job)
                    if not overlap.is_open(job):
                        turns.remove(job)
                        self._send_early(job)

    def _send_early(self, job: Pass) -> None:
        send = self._early.get(_ends(job, len(self.stage_of))[1])
        if send is not None:
            HANDLERS[Send](self, send)

    def _run_segment(self, segment: Segment) -> None:
        """Begin a pass, or let it go on; without points it runs in its first segment.

        The last segment of a W does what is left of it; those before compute gradients
        of the weights of a B that may still run.
        """
        job, overlap = segment.part.of, self.overlap
        stops = overlap.has_points(job.chunk)
        if job.kind is PassKind.W:
            if segment.left == 0:
                overlap.finish(Pass(PassKind.B, job.chunk, job.microbatch))
                with Timed(self.times, segment.part if stops else job):
                    self.stage.backward_weight(job.chunk, job.microbatch)
            elif stops:
                with Timed(self.times, segment.part):
                    n_left = segment.left + 1
                    self.stage.begin_weight(job.chunk, job.microbatch, n_left)
            return
        if segment.begins and not stops:
            self._run_pass(job)
            return
        if segment.begins:
            overlap.begin(job, self._ready_pass(job))
        if overlap.is_open(job):
            with Timed(self.times, segment.part):
                (overlap.go_on if segment.left else overlap.finish)(job)

    # ---- Messages and collectives.

    def _send(self, send: Send) -> None:
        value = send.value
        if isinstance(value, TiedGradient):
            tensors = self.stage.ties.gradients(value)
        elif self._early and value in self._early and value not in self._values:
            return  # it has left before the backward of its pair
        else:
            tensors = self._values.pop(value)
        self.transport.send(value, tensors, send.peer)

    def _post(self, receive: Receive) -> None:
        value, like = receive.value, None
        if isinstance(value, TiedGradient):
            like = self.stage.ties.like(value)
        self._expected[value] = self.transport.post(value, receive.peer, like)

    def _drop(self, drop: _Drop) -> None:
        drop.expected.receive(Check(0))

    def _run_collective(self, job: Collective) -> None:
        """Run it; those that overlap with other jobs get their times as a whole."""
        times, start = self.times, self.times.now()
        with record_function(str(job)) if times.is_profiled else _NOTHING:
            is_alone = job.chunk not in self.collectives.chunks
            if job.kind is CollectiveKind.UNSHARD:
                host = self.optimizer.host
                (host.copy_in if is_alone else host.arrive)(job.chunk)
            self.collectives.run(job)
            if job.kind is CollectiveKind.REDUCE_GRAD and is_alone:
                self.optimizer.copy_out(job.chunk)
        if job.kind is CollectiveKind.REDUCE_WAIT:
            sums = Collective(CollectiveKind.REDUCE_GRAD, job.chunk)
            start = self.collectives.take_start(job.chunk) or start
            times.marks.append((sums, start, times.now()))
        elif job.kind is CollectiveKind.UNSHARD:
            times.marks.append((job, start, times.now()))

    def _tied(self) -> list[TiedGradient]:
        return [value for value in self._expected if isinstance(value, TiedGradient)]

    def _add_tied(self, instruction: AddTied) -> None:
        """Wait for other stages' gradients of tied parameters, and add them."""
        step = Step(instruction.stage)
        received = {x: self._expected.pop(x).receive(step) for x in self._tied()}
        self.times.begin_norms()
        self.stage.ties.add(received)
        self.collectives.sum_tied()

    def _reduce(self, _: Reduce) -> None:
        """Leave each gradient where it belongs, and start the sum over all stages."""
        self.collectives.end_sums()
        self.times.begin_norms()
        self.optimizer.reduce(self.transport)
        self.times.end_norms()

    # ---- The optimizer step.

    def _step(self, job: Step) -> None:
        """Wait for that sum, unless the step is speculative, and step."""
        if not self.optimizer.steps_at_once:
            self.optimizer.wait(job)
        with Timed(self.times, job):
            self.optimizer.step(job)

    def _validate(self, job: Check) -> None:
        """Settle the last step."""
        self.optimizer.wait(job)
        with Timed(self.times, job):
            self._is_invalid = self.optimizer.validate(job)

    def _explain(self, error: Exception, instruction: Any) -> None:
        """Note where an error was raised, once; a broken collective names its peer."""
        if isinstance(instruction, Segment):
            instruction = instruction.part.of
        # an open pass fails in another one's turn
        instruction = self.overlap.failed or self._half or instruction
        if isinstance(error, RuntimeError) and is_broken(error):
            raise self.transport.lost_peer(str(instruction), error) from error
        error.add_note(f"in {instruction}")
        if isinstance(instruction, Pass):
            note_pass(error, instruction, self.stage.chunks[instruction.chunk].indices)


Handler = Callable[[Executor, Any], None]

HANDLERS: dict[Any, Handler] = {
    **dict.fromkeys(PassKind, Executor._run_pass),
    PairKind.FB: Executor._run_pair,
    Segment: Executor._run_segment,
    Send: Executor._send,
    Receive: Executor._post,
    **dict.fromkeys(CollectiveKind, Executor._run_collective),
    AddTied: Executor._add_tied,
    Reduce: Executor._reduce,
    StageKind.STEP: Executor._step,
    StageKind.CHECK: Executor._validate,
    _Drop: Executor._drop,
}
"""Functions that run an instruction, by its kind."""

WAITS: dict[Any, Callable[[Executor, Any], bool]] = {
    **dict.fromkeys(PassKind, Executor._has_inputs),
    PairKind.FB: lambda executor, pair: all(map(executor._has_inputs, passes_in(pair))),
    Segment: lambda executor, x: not x.begins or executor._has_inputs(x.part.of),
    AddTied: lambda executor, _: all(
        executor._expected[value].ready() for value in executor._tied()
    ),
    StageKind.STEP: lambda executor, _: executor.optimizer.ready(),
    StageKind.CHECK: lambda executor, _: executor.optimizer.ready_to_validate(),
    _Drop: lambda executor, drop: drop.expected.ready(),
}
"""False where an instruction would wait for another stage of this process."""


def drive(
    executors: Mapping[int, Executor],
    programs: Sequence[Program] | Mapping[int, Program],
    *,
    training: bool = True,
) -> None:
    """Run the programs of this process's stages, each as far as it can in turn.

    Without ``training`` forwards run, and keep nothing for a backward.
    """
    random = next(iter(executors.values())).stage.random
    may_draw = any(executor.stage.may_draw for executor in executors.values())
    with random.restored() if may_draw else nullcontext():
        runs = []
        for stage, executor in executors.items():
            executor.transport.begin(executor.batch)
            runs.append(executor.run(programs[stage], training=training))
        while runs:
            for run in list(runs):
                if next(run, runs) is runs:
                    runs.remove(run)
