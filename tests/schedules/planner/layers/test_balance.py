"""Balances against all splits: one chunk a stage, V, interleaved, and others."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from random import Random

import pytest

from zbpp.core import LayerCosts, LimitError, Placement
from zbpp.schedules import balance, even_split

KINDS = {
    "one chunk": lambda p: Placement.single(p),
    "V": lambda p: Placement.wave(p),
    "interleaved": lambda p: Placement.interleaved(p, 2),
    "interleaved, in another order": lambda p: Placement((*range(1, p), 0) * 2),
    "wave of three": lambda p: Placement.wave(p, 3),
    "any": lambda p: Placement((0, *range(p), 0)),
}


def all_splits(n_layers: int, n_chunks: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, n_layers), n_chunks - 1):
        yield tuple(end - first for first, end in pairwise((0, *cuts, n_layers)))


def judged(
    layers: LayerCosts,
    placement: Placement,
    m: int,
    split: Sequence[int],
    recompute: Sequence[int] = (),
    in_flight: Sequence[float] | None = None,
) -> tuple[float, list[float]]:
    """Largest load of a stage, and memory of each, from the costs of the chunks."""
    costs = layers.on(placement, split, recompute=recompute)
    times = held = costs.on(placement)
    loads = list(times.optimizer)
    stages = [0.0] * placement.n_stages
    for chunk, stage in enumerate(placement.stage_of):
        loads[stage] += m * (times.f[chunk] + times.b[chunk] + times.w[chunk])
        n = 1.0 if in_flight is None else in_flight[chunk]
        stages[stage] += n * held.m_b[chunk]
    fixed = zip(stages, held.fixed, strict=True)
    return max(loads), [one + more for one, more in fixed]


def drawn(rng: Random, n_layers: int, limit: float | None) -> LayerCosts:
    """Times of few sizes (many ties) or of any; memories of any."""

    def times() -> tuple[float, ...]:
        if rng.random() < 0.5:
            return tuple(rng.choice((0.5, 1.0, 2.0, 3.0)) for _ in range(n_layers))
        return tuple(rng.random() for _ in range(n_layers))

    return LayerCosts(
        n_layers=n_layers,
        f=times(),
        b=times(),
        w=times(),
        optimizer=times(),
        m_b=tuple(1.2 * rng.random() for _ in range(n_layers)),
        m_r=0.1,
        m_fixed=tuple(0.3 * rng.random() for _ in range(n_layers)),
        loss=rng.random(),
        pass_f=rng.choice((0.0, rng.random())),
        pass_w=rng.choice((0.0, rng.random())),
        memory_limit=limit,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limited", [False, True])
def test_no_split_has_a_lower_largest_load(kind: str, limited: bool) -> None:
    rng = Random(f"{kind} {limited}")
    refused = 0
    for _ in range(20):
        placement = KINDS[kind](rng.choice((1, 2, 3, 4)))
        n_chunks, m = placement.n_chunks, rng.choice((1, 4))
        n_layers = rng.randint(n_chunks, max(11, n_chunks))
        limit = rng.uniform(0.2, 1.6) * n_layers if limited else None
        layers = drawn(rng, n_layers, limit)
        recompute = [i for i in range(n_layers) if rng.random() < 0.2]
        in_flight = [rng.choice((1.0, 2.0)) for _ in range(n_chunks)]
        more = recompute, in_flight
        least = math.inf
        for split in all_splits(n_layers, n_chunks):
            load, memory = judged(layers, placement, m, split, *more)
            if max(memory) <= (limit or math.inf):
                least = min(least, load)
        try:
            found = balance(
                layers, placement, m, recompute=recompute, in_flight=in_flight
            )
        except LimitError as error:
            assert least == math.inf and limit is not None and error.smallest > limit
            refused += 1
            continue
        load, memory = judged(layers, placement, m, found.split, *more)
        assert found.is_proved and sum(found.split) == n_layers
        assert found.load == pytest.approx(load) == pytest.approx(least, rel=1e-8)
        assert max(memory) <= (limit or math.inf) * (1 + 1e-9)
    assert refused < 17  # of 20: the limits bind, and leave something


def test_a_stage_of_more_chunks_has_more_passes() -> None:
    """A stage with three chunks beside one with one: overheads move layers away."""
    placement = Placement((0, 1, 0, 2, 0))
    assert balance(LayerCosts(n_layers=12), placement, 2).load == 4 * 6
    heavy = LayerCosts(n_layers=12, pass_f=1.0, pass_w=2.0)
    found = balance(heavy, placement, 2)
    assert found.is_proved and found.load == 5 * 6 + 6
    assert sum(found.split[i] for i in (0, 2, 4)) == 3


def test_of_equal_largest_loads_a_level_split_is_taken() -> None:
    times = (1.0,) * 7 + (6.0,)  # the head fills its stage, 7 layers are left for two
    layers = LayerCosts(n_layers=8, f=times, b=0.0, w=0.0)
    assert sorted(balance(layers, Placement.single(3), 1).split) == [1, 3, 4]
    assert judged(layers, Placement.single(3), 1, even_split(8, 3))[0] == 7.0


@pytest.mark.parametrize(
    ("placement", "n_layers", "most"),
    [
        (Placement.single(64), 128, 1.4),
        (Placement.wave(8), 64, 1.02),
        (Placement.interleaved(4, 2), 64, 1.02),
        (Placement.wave(4, 3), 40, 1.02),
    ],
)
def test_large_models_are_balanced(
    placement: Placement, n_layers: int, most: float
) -> None:
    """No split of these can be listed; ``most`` in mean loads of a stage."""
    rng = Random(0)
    times = tuple(rng.uniform(0.5, 2) for _ in range(n_layers))
    layers = LayerCosts(n_layers=n_layers, f=times, b=times, w=times)
    found = balance(layers, placement, 8)
    assert found.is_proved == (placement.n_chunks <= 2 * placement.n_stages)
    mean = 8 * 3 * sum(times) / placement.n_stages
    assert mean <= found.load <= mean * most
    assert found.load == pytest.approx(judged(layers, placement, 8, found.split)[0])
