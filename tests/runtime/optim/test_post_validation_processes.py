"""Speculative steps between processes leave the bits of steps behind a barrier."""

from typing import Any

import pytest
import torch.distributed as dist
from histories import INF, SPIKE, History, Injector, batch, draw, make, run
from outcomes import Outcome, difference, look, same
from pool import Pool
from small_model import batch as tokens
from small_model import make_pipeline

from zbpp.runtime import PeerError
from zbpp.runtime.optim.stage_optimizer import StageOptimizer


def run_rank(history: History, post_validation: bool) -> Outcome:
    return run(history, None, post_validation=post_validation)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("seed", "mode", "n_stages"),
    [(2, "ZBV", 3), (3, "ZBH2", 4), (4, "1F1B", 2)],
)
def test_histories_between_processes(
    pool: Pool, seed: int, mode: str, n_stages: int
) -> None:
    history = draw(
        seed,
        mode=mode,
        n_microbatches=4,
        events=(SPIKE, None, INF, INF, None, SPIKE),
        looks=("read", "", "evaluate", "", "state_dict", ""),
    )
    ours = pool.run(run_rank, n_stages, history, True)
    theirs = pool.run(run_rank, n_stages, history, False)
    for mine, other in zip(ours, theirs, strict=True):
        assert difference(mine, other) is None
        assert mine.rollbacks == [1, 0, 1, 1, 0, 1]


def run_unseeded(history: History, post_validation: bool) -> Outcome:
    return run(history, None, post_validation=post_validation, seed=None)


@pytest.mark.dist
def test_random_numbers_of_torch_are_replayed(pool: Pool) -> None:
    history = draw(
        1, mode="ZBH2", dropout=0.3, n_microbatches=4,
        events=(None, SPIKE, INF, None), looks=("",) * 4,
    )  # fmt: skip
    ours = pool.run(run_unseeded, 2, history, True)
    theirs = pool.run(run_unseeded, 2, history, False)
    for mine, other in zip(ours, theirs, strict=True):
        assert difference(mine, other) is None
    seeded = pool.run(run_rank, 2, history, True)
    assert difference(ours[0], seeded[0]) is not None


def read_on_one_rank_only(history: History) -> tuple[list[float], dict[str, Any]]:
    """Rank 0 looks after every step; the others look at the end only."""
    pipeline = make(history, None, post_validation=True)
    injector = Injector(pipeline)
    seen = []
    for step, event in enumerate(history.events):
        injector.begin(event)
        result = pipeline.step(*batch(history, step))
        if pipeline.rank == 0:
            seen.append(result.loss)
            if step % 2:
                pipeline.synchronize()
    state = look(pipeline, [])
    pipeline.close()
    return seen, state


@pytest.mark.dist
def test_one_rank_may_look_while_the_others_go_on(pool: Pool) -> None:
    events = (None, SPIKE, SPIKE, INF, INF, None, SPIKE)
    history = draw(
        1, mode="ZBV", n_microbatches=4, optimizer="fused",
        events=events, looks=("",) * len(events), scheduler=None,
    )  # fmt: skip
    looked = pool.run(read_on_one_rank_only, 3, history)
    plain = pool.run(run_rank, 3, history, False)
    assert looked[0][0] == [loss for loss, _, _ in plain[0].results]
    for (_, state), outcome in zip(looked, plain, strict=True):
        assert all(same(value, outcome.states[-1][key]) for key, value in state.items())


def wait_at_v() -> str:
    """Rank 1 has sent all gradients, and then hangs until rank 0 has ended."""
    pipeline = make_pipeline(
        "ZBH1", None, timeout_s=4.0, first_timeout_s=100.0, post_validation=True
    )
    store = dist.distributed_c10d._get_default_store()
    for step in range(3):  # in which stages tell one another what they were handed
        pipeline.step(*tokens(step))
    if pipeline.rank == 1:
        reduce = StageOptimizer.reduce

        def late(self: StageOptimizer, transport: Any) -> None:
            store.wait(["rank 0 has ended"])
            reduce(self, transport)

        StageOptimizer.reduce = late
    try:
        for step in (3, 4):
            pipeline.step(*tokens(step))
    except PeerError as error:
        return str(error)
    finally:
        if pipeline.rank == 1:
            StageOptimizer.reduce = reduce
        else:
            store.set("rank 0 has ended", "")
    return "no error"


@pytest.mark.dist
def test_a_stage_that_waits_at_v_says_so(pool: Pool) -> None:
    message, _ = pool.run(wait_at_v, 2)
    assert message == (
        "stage 0 waits at V for the sum over the other stages: no answer in 4 s; "
        "rank 1 has left no word: it was killed, hangs, or has left the loop"
    )
