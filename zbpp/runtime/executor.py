"""The loop that runs one stage's program. It knows jobs and messages, never modes.

    instruction   handler
    Receive       announce it to the transport
    F B W BW      take what it reads, compute, keep what it writes
    Send          hand it to the transport
    Reduce        start the sum of gradient norms and losses over all stages
    AddTied       wait for the other stages' gradients of tied parameters, and add
    Step          wait for that sum, clip, step or skip; or step speculatively
    Check         validate that step; if it is invalid, replay what came before

Every job leaves its times (`zbpp.runtime.job_times`), and under a profiler a range with
its name. The times of O and V are those of their work: the wait for the sum is none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

from torch.profiler import record_function

from zbpp.core import (
    AddTied,
    Check,
    Job,
    Pass,
    PassKind,
    Program,
    Receive,
    Reduce,
    Send,
    Step,
    TiedGradient,
    Value,
    at_check,
    input_of,
    output_of,
)
from zbpp.runtime.comm.transport import Opening, Transport
from zbpp.runtime.constants import without_constants
from zbpp.runtime.job_times import JobTimes
from zbpp.runtime.optim.stage_optimizer import StageOptimizer
from zbpp.runtime.replay import Replay
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.fault_injection import requested_fault
from zbpp.runtime.support.torch_internals import profiling
from zbpp.runtime.values import Nested, Tensors

__all__ = ["Executor", "drive"]

_T = TypeVar("_T")


class Executor:
    """Runs programs on one stage.

    Args:
        stage: the stage's chunks.
        transport: its messages.
        optimizer: its share of the optimizer step.
        stage_of: stage of every chunk of the whole model.
        rank: of this process, for faults on demand.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        optimizer: StageOptimizer,
        *,
        stage_of: Sequence[int],
        rank: int,
    ) -> None:
        self.stage = stage
        self.transport = transport
        self.optimizer = optimizer
        self.times = JobTimes(stage.device)
        self._stage_of = stage_of
        self._n_chunks = len(stage_of)
        self.opening = Opening(1)
        """Of the step that begins next."""
        self._rank = rank
        self._fault = requested_fault()
        self._here: dict[Value, Tensors] = {}
        self._posted: set[Value] = set()
        self._replay = Replay(stage) if optimizer.speculates else None
        self._is_invalid = False
        self._norms_began: Any = None  # where tied gradients are added first
        optimizer.inject_fault = self._inject_fault
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            Pass: self._pass,
            Step: self._step,
            Check: self._check,
            Send: self._send,
            Receive: self._receive,
            Reduce: self._reduce,
            AddTied: self._add_tied,
        }
        self._passes: dict[PassKind, Callable[[int, int, Any], Tensors | None]] = {
            PassKind.B: self.stage.backward_input,
            PassKind.W: self._backward_weight,
            PassKind.BW: self._backward,
        }

    def run(self, program: Program, *, training: bool = True) -> Iterator[None]:
        """Run a program; yield where another stage of this process must go first.

        Args:
            program: this stage's instructions.
            training: False runs the forwards without keeping anything for a backward.

        Raises:
            PeerError, ShapeError: from the transport.
            Exception: whatever the model raises, with a note that names the job.
        """
        self.times.begin(training=training)
        self._profiled = profiling()
        self._trains = training
        self._passes[PassKind.F] = (
            self.stage.forward if training else self.stage.predict
        )
        before, rest = at_check(program)
        if training:
            self.optimizer.begin_step()
            if self._replay is not None:
                self._replay.begin(may_rewind=self.optimizer.may_replay)
        yield from self._run(before)
        if rest and isinstance(rest[0], Check):
            yield from self._run(rest[:1])
            if self._is_invalid:
                yield from self._replay_forwards(rest[0], before)
            rest = rest[1:]
        if training:
            if self._replay is not None:
                self._replay.decided()
            self.optimizer.begin_backward()
            self.stage.ties.begin()
        yield from self._run(rest)
        if training and self._replay is not None:
            self._replay.end()
        assert not self._here and not self._posted, "values were left over"
        self.stage.assert_empty()
        self.transport.end()

    def _run(self, program: Program) -> Iterator[None]:
        for instruction in program:
            while not self._ready(instruction):
                yield
            try:
                self._inject_fault(str(instruction))
                self._handlers[type(instruction)](instruction)
            except Exception as error:
                error.add_note(f"in {instruction}")
                raise

    def _replay_forwards(self, job: Check, before: Program) -> Iterator[None]:
        """The speculative step is invalid: run what was before V once more.

        All stages do so together, so what has been sent before is sent again; what has
        come of it and was not read yet is invalid as well.
        """
        assert self._replay is not None
        self._inject_fault("replay")
        self._here.clear()
        self._replay.rewind()
        yield from self._drop_received(job, before)
        yield from self._run(before)

    def _drop_received(self, job: Check, before: Program) -> Iterator[None]:
        for instruction in before:
            if isinstance(instruction, Receive) and instruction.value in self._posted:
                while not self.transport.ready(instruction.value):
                    yield
                self._posted.remove(instruction.value)
                self.transport.receive(instruction.value, job)

    def _inject_fault(self, name: str) -> None:
        """Let the fault happen that was asked for here, if any."""
        if self._fault is not None:
            self._fault.inject(self._rank, self.stage.step, name)

    def _ready(self, instruction: object) -> bool:
        match instruction:
            case Pass():
                value = input_of(instruction, self._n_chunks)
                return value not in self._posted or self.transport.ready(value)
            case AddTied():
                return self.stage.ties.ready(self.transport)
            case Step():
                return self.optimizer.ready()
            case Check():
                return self.optimizer.ready_to_validate()
        return True

    def _pass(self, job: Pass) -> None:
        tensors = None
        value = input_of(job, self._n_chunks)
        if value in self._posted:
            self._posted.remove(value)
            tensors = self.transport.receive(value, job)
            if isinstance(tensors, Nested):
                tensors = self.stage.constants.fill(tensors, job.microbatch)
        elif value is not None:
            tensors = self._here.pop(value)
        if job.kind is not PassKind.F:
            self.optimizer.before_gradients()
        with self._watching(job):
            result = self._timed(
                job, partial(self._passes[job.kind], job.chunk, job.microbatch, tensors)
            )
        value = output_of(job, self._n_chunks)
        if value is not None:
            assert result is not None
            self._here[value] = result

    def _watching(self, job: Pass) -> AbstractContextManager[None]:
        if self._replay is None or job.kind is not PassKind.F or not self._trains:
            return nullcontext()
        return self._replay.forward(job)

    def _backward(self, chunk: int, microbatch: int, dy: Tensors | None) -> Tensors:
        """BW: the same B and W, in one job."""
        result = self.stage.backward_input(chunk, microbatch, dy)
        self.stage.backward_weight(chunk, microbatch)
        return result

    def _backward_weight(self, chunk: int, microbatch: int, _: None) -> None:
        self.stage.backward_weight(chunk, microbatch)

    def _send(self, instruction: Send) -> None:
        value, peer = instruction.value, instruction.peer
        if isinstance(value, TiedGradient):
            self.stage.ties.send(value, self.transport, peer)
            return
        tensors = self._here.pop(value)
        if isinstance(tensors, Nested):
            tensors = without_constants(tensors, value.chunk, peer, self._stage_of)
        self.transport.send(value, tensors, peer)

    def _receive(self, instruction: Receive) -> None:
        value, peer = instruction.value, instruction.peer
        if isinstance(value, TiedGradient):
            self.stage.ties.post(value, self.transport, peer)
            return
        self._posted.add(value)
        self.transport.post(value, peer)

    def _add_tied(self, instruction: AddTied) -> None:
        ties = self.stage.ties
        received = ties.receive(self.transport, Step(instruction.stage))
        self._norms_began = self.times.now()
        ties.add(received)

    def _reduce(self, instruction: Reduce) -> None:
        start, self._norms_began = self._norms_began or self.times.now(), None
        self.optimizer.reduce(self.transport)
        self.times.norms.append((start, self.times.now()))

    def _step(self, job: Step) -> None:
        if not self.optimizer.steps_at_once:
            self.optimizer.wait(job)
        self._timed(job, partial(self.optimizer.step, job))

    def _check(self, job: Check) -> None:
        self.optimizer.wait(job)
        self._is_invalid = self._timed(job, partial(self.optimizer.validate, job))

    def _timed(self, job: Job, action: Callable[[], _T]) -> _T:
        """Note when a job runs, and name it in profiles as it is named in the plots."""
        now = self.times.now
        start = now()
        with record_function(str(job)) if self._profiled else nullcontext():
            result = action()
        self.times.marks.append((job, start, now()))
        return result


def drive(
    executors: Mapping[int, Executor],
    programs: Sequence[Program],
    *,
    training: bool = True,
) -> None:
    """Run the programs of this process's stages, each as far as it can in turn.

    Args:
        executors: by stage; all stages, or the only one of this process.
        programs: one per stage of the pipeline.
        training: False runs the forwards alone.
    """
    running = []
    for stage, executor in executors.items():
        executor.transport.begin(executor.opening if training else None)
        running.append(executor.run(programs[stage], training=training))
    while running:
        running = [run for run in running if next(run, _DONE) is not _DONE]


_DONE = object()
