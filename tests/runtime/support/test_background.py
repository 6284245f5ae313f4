"""Slices of work run while the stage waits, and only then."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from histories import ALWAYS, SPIKE, History, batch, draw, make, run
from moments import idle_moments, uncertain_sums
from outcomes import difference
from pool import Pool

from zbpp.runtime.support.background import BackgroundWork


def slices(n: int, done: list[str], *, possible: Any = None) -> Iterator[bool]:
    while possible is not None and not possible.is_set():
        yield False
    for _ in range(n):
        time.sleep(0.001)
        done.append(threading.current_thread().name)
        yield True


def test_work_is_done_while_the_stage_waits_and_not_after() -> None:
    background, done = BackgroundWork(), list[str]()
    background.offer(slices(1000, done))
    with background.waiting():
        time.sleep(0.05)
    so_far = len(done)
    assert 5 < so_far < 60
    time.sleep(0.02)
    assert len(done) == so_far
    background.finish()
    assert len(done) == 1000
    here = threading.current_thread().name
    assert done[so_far:] == [here] * (1000 - so_far)
    assert here not in done[:so_far]


def test_nothing_to_do_starts_no_thread() -> None:
    background, before = BackgroundWork(), threading.active_count()
    with background.waiting():
        assert threading.active_count() == before
    background.finish()


def test_on_a_gpu_all_is_left_to_the_stage() -> None:
    background, done = BackgroundWork(in_thread=False), list[str]()
    background.offer(slices(3, done))
    with background.waiting():
        time.sleep(0.02)
    assert not done
    background.finish()
    assert set(done) == {threading.current_thread().name}


def test_work_that_is_done_is_over() -> None:
    background, done = BackgroundWork(), list[str]()
    background.offer(slices(3, done))
    with background.waiting():
        time.sleep(0.05)
    background.finish()
    assert len(done) == 3


def test_work_waits_until_it_can_be_done() -> None:
    background, done, possible = BackgroundWork(), list[str](), threading.Event()
    background.offer(slices(1, done, possible=possible))
    with background.waiting():
        time.sleep(0.01)
        assert not done
        possible.set()
        time.sleep(0.05)
    assert len(done) == 1


def test_a_failure_comes_out_where_the_stage_waits() -> None:
    def fails() -> Iterator[bool]:
        yield True
        raise ValueError("no")

    background = BackgroundWork()
    background.offer(fails())
    with pytest.raises(ValueError, match="no"), background.waiting():
        time.sleep(0.05)
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
    """Slices while this rank waits, and at other times; rank 0 is late for a step."""
    history = history_of(rollback)
    pipeline = make(history, None, post_validation=True)
    share = pipeline._executors[pipeline.rank].optimizer
    keep, reduce, counts = share._keep, share.reduce, [0, 0]

    def counted(*args: Any) -> Iterator[bool]:
        for could in keep(*args):
            counts[threading.current_thread() is threading.main_thread()] += could
            yield could

    def reduce_late(transport: Any) -> None:
        time.sleep(0.02)  # rank 1 has stepped by now
        reduce(transport)

    share._keep = counted  # type: ignore[method-assign]
    if never:
        pipeline._executors[pipeline.rank].transport.background._in_thread = False
    if pipeline.rank == 0:
        share.reduce = reduce_late  # type: ignore[method-assign]
    for step in range(5):
        if pipeline.rank == 0:
            time.sleep(0.1)
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
