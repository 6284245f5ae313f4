"""The loop that runs one stage's program. It knows jobs and messages, never modes.

    instruction   call
    Receive       announce it to the transport
    F B W BW      take what it reads, compute, keep what it writes
    Send          hand it to the transport
    Reduce        start the sum of gradient norms and losses over all stages
    AddTied       wait for the other stages' gradients of tied parameters, and add
    Step          wait for that sum, clip, step or skip; or step speculatively
    Check         validate that step; if it is invalid, replay what came before

A program is bound to the stage once (`zbpp.runtime.bound`): a step then goes through a
list of calls. Every job leaves its times (`zbpp.runtime.job_times`), and under a
profiler a range with its name. The times of O and V are those of their work: the wait
for the sum is none.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch.profiler import record_function

from zbpp.core import (
    AddTied,
    Check,
    Collective,
    CollectiveKind,
    Job,
    Pass,
    Program,
    Reduce,
    Step,
)
from zbpp.runtime.bound import BoundProgram, Call, StageParts
from zbpp.runtime.comm.private_group import is_broken
from zbpp.runtime.comm.transport import Opening, Transport
from zbpp.runtime.error_notes import note_pass
from zbpp.runtime.optim.stage_optimizer import StageOptimizer
from zbpp.runtime.parallel.stage import Collectives
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.fault_injection import requested_fault
from zbpp.runtime.support.streams import StageStream
from zbpp.runtime.support.torch_internals import profiling

__all__ = ["Executor", "drive"]

_T = TypeVar("_T")


class Executor(StageParts):
    """Runs programs on one stage.

    Args:
        stage: the stage's chunks.
        transport: its messages.
        optimizer: its share of the optimizer step.
        stage_of: stage of every chunk of the whole model.
        rank: of this process, for faults on demand.
        collectives: of its replicas and shards; None: it has none.
    """

    def __init__(
        self,
        stage: Stage,
        transport: Transport,
        optimizer: StageOptimizer,
        *,
        stage_of: Sequence[int],
        rank: int,
        collectives: Collectives | None = None,
    ) -> None:
        super().__init__(stage, transport, optimizer, stage_of, collectives)
        self.opening = Opening(1)
        """Of the step that begins next."""
        self.stream: StageStream | None = None
        """Computes this stage, where several share a GPU and each has its own."""
        self._rank = rank
        self._fault = requested_fault()
        self._bound: dict[bool, BoundProgram] = {}  # by whether it trains
        self._is_invalid = False
        self._norms_began: Any = None  # where tied gradients are added first
        optimizer.inject_fault = self._inject_fault
        self.collectives.now = self.times.now
        self._progress = self.collectives.progress(stage.chunks.values())
        self._others: Mapping[type, Callable[[Any], Call]] = {
            Step: lambda x: Call(optimizer.ready, partial(self._step, x), x),
            Check: lambda x: Call(
                optimizer.ready_to_validate, partial(self._check, x), x
            ),
            Collective: lambda x: Call(None, partial(self._collective, x), x),
            Reduce: lambda x: Call(None, self._reduce, x),
            AddTied: lambda x: Call(
                partial(stage.ties.ready, self.transport), partial(self._add_tied, x), x
            ),
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
        bound = self._bind(program, training=training)
        self.times.begin(training=training)
        self.is_profiled = profiling()
        if not training:
            yield from self._run(bound.rest)
        else:
            yield from self._train(bound)
        self.collectives.end()
        bound.assert_empty()
        self.stage.assert_empty()
        self.transport.end()

    def _bind(self, program: Program, *, training: bool) -> BoundProgram:
        """Bind a program, or return it as it was bound before."""
        bound = self._bound.get(training)
        if bound is None or not bound.fits(program, self.transport):
            bound = BoundProgram(self, program, self._others, training=training)
            self._bound[training] = bound
        return bound

    def _train(self, bound: BoundProgram) -> Iterator[None]:
        replay, rest = self.replay, bound.rest
        self.optimizer.begin_step()
        if replay is not None:
            replay.begin(may_rewind=self.optimizer.may_replay)
        yield from self._run(bound.before)
        if rest and isinstance(rest[0].instruction, Check):
            yield from self._run(rest[:1])
            if self._is_invalid:
                yield from self._replay_forwards(rest[0].instruction, bound)
            rest = rest[1:]
        if replay is not None:
            replay.decided()
        self.optimizer.begin_backward()
        self.stage.ties.begin()
        if bound.reduces:
            self.stage.watch_weights(self._progress)
        yield from self._run(rest)
        if replay is not None:
            replay.end()

    def _run(self, calls: Sequence[Call]) -> Iterator[None]:
        for ready, run, instruction in calls:
            if ready is not None:
                while not ready():
                    yield
            try:
                if self._fault is not None:
                    self._inject_fault(str(instruction))
                run()
            except Exception as error:
                if isinstance(error, RuntimeError) and is_broken(error):
                    lost = self.transport.lost_peer(str(instruction), error)
                    raise lost from error
                error.add_note(f"in {instruction}")
                if isinstance(instruction, Pass):
                    chunk = self.stage.chunks[instruction.chunk]
                    layers = list(chunk.numbered())
                    note_pass(error, instruction, layers, chunk.name_of)
                raise

    def _replay_forwards(self, job: Check, bound: BoundProgram) -> Iterator[None]:
        """The speculative step is invalid: run what was before V once more.

        All stages do so together, so what has been sent before is sent again; what has
        come of it and was not read yet is invalid as well.
        """
        assert self.replay is not None
        self._inject_fault("replay")
        bound.forget()
        self.collectives.rewind()
        self.replay.rewind()
        for place in bound.posted():
            while not self.transport.ready(place.value):
                yield
            place.is_posted = False
            self.transport.receive(place.value, job)
        yield from self._run(bound.before)

    def _inject_fault(self, name: str) -> None:
        """Let the fault happen that was asked for here, if any."""
        if self._fault is not None:
            self._fault.inject(self._rank, self.stage.step, name)

    def _collective(self, job: Collective) -> None:
        """Run a collective; those that go on beside other jobs are noted whole."""
        start = self.times.now()
        if self.is_profiled:
            with record_function(str(job)):
                self.collectives.run(job)
        else:
            self.collectives.run(job)
        if job.kind is CollectiveKind.REDUCE_WAIT:
            sums = Collective(CollectiveKind.REDUCE_GRAD, job.chunk)
            began = self.collectives.began.pop(job.chunk, start)
            self.times.marks.append((sums, began, self.times.now()))
        elif job.kind is CollectiveKind.UNSHARD:
            self.times.marks.append((job, start, self.times.now()))

    def _add_tied(self, instruction: AddTied) -> None:
        ties = self.stage.ties
        received = ties.receive(self.transport, Step(instruction.stage))
        self._norms_began = self.times.now()
        ties.add(received)
        self.collectives.sum_tied()

    def _reduce(self) -> None:
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
        start = self.times.now()
        if self.is_profiled:
            with record_function(str(job)):
                result = action()
        else:
            result = action()
        self.times.marks.append((job, start, self.times.now()))
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
        run = executor.run(programs[stage], training=training)
        running.append((run, executor.stream))
    streams = [stream for _, stream in running if stream is not None]
    for stream in streams:
        stream.fork()
    while running:
        running = [one for one in running if _goes_on(*one)]
    for stream in streams:
        stream.join()


def _goes_on(run: Iterator[None], stream: StageStream | None) -> bool:
    """Run a program as far as it can go; return whether anything is left of it."""
    if stream is None:
        return next(run, _DONE) is not _DONE
    with stream.running():
        return next(run, _DONE) is not _DONE


_DONE = object()
