"""On a GPU the times of jobs are those of events, and no step waits for them."""

import platform
import time

import pytest
import torch
import torch.distributed as dist
from fake_stream import FakeStream
from pool import Pool
from small_model import batch, make_pipeline
from torch import Tensor, nn

from zbpp import diagnostics
from zbpp.core import Pass, PassKind, Step, Timeline
from zbpp.pipeline import Pipeline
from zbpp.runtime.job_times import JobTimes
from zbpp.simulator import step_time

SECONDS = {"F": 0.25, "B": 0.5}


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, stream: FakeStream) -> Tensor:
        ctx.stream = stream  # type: ignore[attr-defined]
        stream.run(SECONDS["F"])
        return x.clone()

    @staticmethod
    def backward(ctx: object, dx: Tensor) -> tuple[Tensor, None]:
        ctx.stream.run(SECONDS["B"])  # type: ignore[attr-defined]
        return dx, None


class Kernel(nn.Module):
    """Takes its time on a stream, and none on the host."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self.stream = stream
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return _Launch.apply(self.linear(x), self.stream)  # type: ignore[no-any-return]


def on_a_gpu(streams: list[FakeStream]) -> Pipeline:
    pipeline = Pipeline(
        [Kernel(stream) for stream in streams],
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule="ZBH1",
        n_stages=len(streams),
        n_microbatches=3,
    )
    for stage, executor in pipeline.stages.executors.items():
        executor.times = JobTimes(
            torch.device("cpu"), make_event=streams[stage].event, window=4
        )
    return pipeline


def kinds(pipeline: Pipeline) -> dict[object, set[float]]:
    found: dict[object, set[float]] = {}
    for row in diagnostics.timeline(pipeline).rows:
        for slot in row:
            kind = slot.job.kind if isinstance(slot.job, Pass) else type(slot.job)
            found.setdefault(kind, set()).add(round(slot.duration, 6))
    return found


def test_jobs_take_the_time_of_their_kernels_not_of_their_launches() -> None:
    streams = [FakeStream(), FakeStream()]
    pipeline = on_a_gpu(streams)
    x = torch.randn(6, 2)
    for _ in range(7):
        pipeline.step(x, x)
    found = kinds(pipeline)
    assert found[PassKind.F] == {0.25} and found[PassKind.B] == {0.5}
    assert found[PassKind.W] == {0.0}
    assert found[Step] == {0.0}
    costs = diagnostics.measured_costs(pipeline)
    assert costs.f == (250.0, 250.0) and costs.b == (500.0, 500.0)


def test_no_step_waits_for_an_event_but_the_first_for_its_first() -> None:
    streams = [FakeStream(), FakeStream()]
    pipeline = on_a_gpu(streams)
    for _ in range(5):
        pipeline.step(torch.randn(6, 2), torch.randn(6, 2))
        assert [stream.n_waits for stream in streams] == [1, 1]
    diagnostics.timeline(pipeline)
    assert [stream.n_waits for stream in streams] == [2, 2]


def test_steps_follow_one_another_on_one_axis_and_old_ones_are_dropped() -> None:
    stream = FakeStream()
    times = JobTimes(torch.device("cpu"), make_event=stream.event, window=3)
    job = Pass(PassKind.F, 0, 0)
    starts = []
    for _ in range(5):
        times.begin(training=True)
        start = times.now()
        starts.append(stream.now_s)
        stream.run(2.0)
        times.marks.append((job, start, times.now()))
        stream.run(1.0)
    found = [slots[0] for slots in times.steps(99)]
    assert [slot.duration for slot in found] == pytest.approx([2.0] * 3)
    gaps = [slot.start - found[0].start for slot in found]
    assert gaps == pytest.approx([start - starts[2] for start in starts[2:]])


def test_an_evaluation_leaves_the_times_of_the_last_step() -> None:
    pipeline = make_pipeline("ZBH1", 2)
    pipeline.step(*batch(0))
    before = diagnostics.timeline(pipeline)
    pipeline.evaluate(*batch(1))
    assert diagnostics.timeline(pipeline) == before


def test_a_profile_names_the_jobs() -> None:
    """The control: what runs outside of jobs is in no range of theirs."""
    pipeline = make_pipeline("ZBH1", 2)
    inputs, targets = batch(0)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        pipeline.step(inputs, targets)
    told = {event.name for event in profile.events()}
    jobs = {str(job) for order in pipeline.schedule.orders for job in order}
    assert jobs - {"V"} <= told
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert not jobs & {event.name for event in profile.events()}


AHEAD_S = 1000.0


def on_two_clocks() -> tuple[Timeline, Timeline]:
    """A step's timeline on two machines, and as if these were one."""
    rank, real = dist.get_rank(), time.perf_counter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: real() + rank * AHEAD_S)
        with make_pipeline("ZBH1", None) as pipeline:
            pipeline.step(*batch(0))
            wrong = diagnostics.timeline(pipeline)
            patch.setattr(platform, "node", lambda: f"machine {rank}")
            return diagnostics.timeline(pipeline), wrong


@pytest.mark.dist
def test_a_timeline_of_several_machines_has_one_clock(pool: Pool) -> None:
    found, wrong = pool.run(on_two_clocks, 2)[0]
    assert step_time(found) < AHEAD_S / 2 < step_time(wrong)
