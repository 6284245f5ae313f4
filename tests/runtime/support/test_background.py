"""Slices of work run while the stage waits, and only then."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from histories import ALWAYS, SPIKE, History, batch, draw, make, run
from moments import idle_moments, uncertain_sums
from outcomes import difference
from pool import Pool

from zbpp.runtime.support.background import BackgroundWork

PATIENCE_S = 60.0
"""For events that come at once on an idle machine."""


class Slices:
    """Work of n slices that tells how far it is; each says which thread did it."""

    def __init__(self, n: int, *, possible: threading.Event | None = None) -> None:
        self.n, self.possible = n, possible
        self.done: list[str] = []
        self.asked, self.some, self.all = (threading.Event() for _ in range(3))

    def __iter__(self) -> Iterator[bool]:
        while self.possible is not None and not self.possible.is_set():
            self.asked.set()
            yield False
        for _ in range(self.n):
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.001)
            self.done.append(threading.current_thread().name)
            if len(self.done) == 5:
                self.some.set()
            yield True
        self.all.set()


def test_work_is_done_while_the_stage_waits_and_not_after() -> None:
    background, work = BackgroundWork(), Slices(100_000)
    background.offer(iter(work))
    with background.waiting():
        assert work.some.wait(PATIENCE_S)
    so_far = len(work.done)
    assert 5 <= so_far < work.n  # the rest would take the thread 100 s
    time.sleep(0.02)
    assert len(work.done) == so_far
    background.finish()
    assert len(work.done) == work.n
    here = threading.current_thread().name
    assert set(work.done[so_far:]) == {here}
    assert here not in work.done[:so_far]


def idle_threads() -> set[threading.Thread]:
    """Threads of stages that wait; others may come and go meanwhile."""
    return {x for x in threading.enumerate() if x.name.startswith("zbpp-idle")}


def test_nothing_to_do_starts_no_thread() -> None:
    background, before = BackgroundWork(), idle_threads()
    with background.waiting():
        assert idle_threads() <= before
    background.finish()


def test_on_a_gpu_all_is_left_to_the_stage() -> None:
    background, work = BackgroundWork(in_thread=False), Slices(3)
    background.offer(iter(work))
    before = idle_threads()
    with background.waiting():
        assert idle_threads() <= before
    assert not work.done
    background.finish()
    assert work.done == [threading.current_thread().name] * 3


def test_work_that_is_done_is_over() -> None:
    background, work = BackgroundWork(), Slices(3)
    background.offer(iter(work))
    with background.waiting():
        assert work.all.wait(PATIENCE_S)
    background.finish()
    assert len(work.done) == 3


def test_work_waits_until_it_can_be_done() -> None:
    possible = threading.Event()
    background, work = BackgroundWork(), Slices(1, possible=possible)
    background.offer(iter(work))
    with background.waiting():
        assert work.asked.wait(PATIENCE_S)
        assert not work.done
        possible.set()
        assert work.all.wait(PATIENCE_S)
    assert len(work.done) == 1


def test_a_failure_comes_out_where_the_stage_waits() -> None:
    begun = threading.Event()

    def fails() -> Iterator[bool]:
        yield True
        begun.set()
        raise ValueError("no")

    background = BackgroundWork()
    background.offer(fails())
    with pytest.raises(ValueError, match="no"), background.waiting():
        assert begun.wait(PATIENCE_S)
    background.offer(fails())
    with pytest.raises(ValueError, match="no"):
        background.finish()


def history_of(rollback: str, **more: Any) -> History:
    return draw(
        3, mode="ZBH1", n_microbatches=5, rollback=rollback, dtype=torch.float32,
        optimizer="fused", patience=ALWAYS, events=(None, None, SPIKE, None, None),
        looks=("",) * 5, **more,
    )  # fmt: skip


@pytest.mark.parametrize("rollback", ["deferred", "snapshot"])
def test_slices_between_any_two_jobs_leave_the_same_bits(rollback: str) -> None:
    history = history_of(rollback, n_stages=4)
    with uncertain_sums(0, share=0.5), idle_moments(0) as moments:
        ours = run(history, 4, post_validation=True)
    assert sum(moments) > 10  # there were some
    assert difference(ours, run(history, 4, post_validation=False)) is None


def count_slices(rollback: str, never: bool = False) -> tuple[int, int]:
    """Slices while this rank waits, and at other times.

    Rank 0 is late: it adds its norm to a step's sum when rank 1 has stepped, and
    begins the next step when rank 1 has done all its slices.
    """
    history = history_of(rollback)
    pipeline = make(history, None, post_validation=True)
    executor = pipeline.stages.executors[pipeline.rank]
    for _ in range(3):  # in which stages tell one another what they were handed
        pipeline.step(*batch(history, 0))
    share, background = executor.optimizer, executor.transport.background
    keep, take, reduce, counts = share._keep, share.step, share.reduce, [0, 0]
    store = dist.distributed_c10d._get_default_store()

    def counted(*args: Any) -> Iterator[bool]:
        return count(keep(*args), f"rank {pipeline.rank} has done step {step}")

    def count(work: Iterator[bool], name: str) -> Iterator[bool]:
        for could in work:
            counts[threading.current_thread() is threading.main_thread()] += could
            yield could
        store.set(name, "")

    def step_and_tell(job: Any) -> None:
        take(job)
        store.set(f"rank {pipeline.rank} has begun step {step}", "")

    def reduce_late(transport: Any) -> None:
        store.wait([f"rank 1 has begun step {step}"])
        reduce(transport)

    share._keep = counted  # type: ignore[method-assign]
    share.step = step_and_tell  # type: ignore[method-assign]
    if never:
        background._in_thread = False
    if pipeline.rank == 0:
        share.reduce = reduce_late  # type: ignore[method-assign]
    for step in range(5):
        if pipeline.rank == 0 and step > 0 and not never:
            store.wait([f"rank 1 has done step {step - 1}"])
        pipeline.step(*batch(history, step))
    waiting, otherwise = counts
    pipeline.close()
    return waiting, otherwise


@pytest.mark.dist
@pytest.mark.parametrize("rollback", ["deferred", "snapshot"])
def test_a_rank_that_waits_has_done_it_all(pool: Pool, rollback: str) -> None:
    _, (waiting, otherwise) = pool.run(count_slices, 2, rollback)
    assert waiting > 0
    assert otherwise == 0


@pytest.mark.dist
def test_without_a_thread_it_is_left_to_the_stage(pool: Pool) -> None:
    _, (waiting, otherwise) = pool.run(count_slices, 2, "deferred", True)
    assert waiting == 0
    assert otherwise > 0
