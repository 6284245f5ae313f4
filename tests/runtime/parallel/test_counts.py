"""A step's collectives are those that its jobs ask for, and begin when they can."""

import pytest
from mesh_runs import WIDTH, collect_all
from pool import Pool

pytestmark = pytest.mark.dist

GATHER, SCATTER, SUM = "allgather_base", "reduce_scatter_base", "allreduce"
LAYERS, M = 4, 8
"""Layers of a stage, micro-batches of a replica."""
BLOCK = 4 * (2 * WIDTH + (WIDTH + 1) * 2 * WIDTH + 2 * WIDTH * WIDTH)
"""Bytes of a block: norm, up with its bias, down."""


@pytest.mark.slow
def test_collectives_of_a_step(pool: Pool) -> None:
    hows = ("kept", "resharded", "replicate", "bare")
    found = pool.run(collect_all, 4, [(how, "1F1B") for how in hows])
    for kept, resharded, replicate, bare in found:
        assert kept[0] == {GATHER: LAYERS, SCATTER: LAYERS}
        assert resharded[0] == {GATHER: LAYERS * M * 2, SCATTER: LAYERS}
        assert replicate[0] == bare[0] == {SUM: LAYERS}
    # stage 0 has four blocks
    assert found[0][0][1] == {GATHER: LAYERS * BLOCK, SCATTER: LAYERS * BLOCK}
    assert found[0][3][1] == {SUM: LAYERS * BLOCK}


def test_sums_begin_within_the_last_weight_pass(pool: Pool) -> None:
    for ((_, _, jobs),) in pool.run(collect_all, 4, [("kept", "ZBV")]):
        slots = {name: (start, end) for name, start, end in jobs}
        chunks = {name[0] for name in slots if name.endswith("REDUCE_GRAD")}
        assert len(chunks) == 2
        beside = 0
        for chunk in chunks:
            began, ended = slots[f"{chunk}REDUCE_GRAD"]
            last = max(slots[f"{chunk}W{i}"] for i in range(M))
            assert last[0] < began < last[1]
            beside += sum(
                began < start and end < ended for start, end in slots.values()
            )
        assert beside > 0
