"""Balances against all splits: single, V, interleaved, and others, with memory."""

import math
from random import Random

import pytest

from zbpp.core import LayerCosts, LimitError, Placement
from zbpp.schedules import balance, even_split
from zbpp.schedules.planner.layers.loads import Loads
from zbpp.schedules.planner.layers.many_chunks import all_splits
from zbpp.schedules.planner.layers.two_chunks import is_two_chunks

KINDS = {
    "single": lambda p: Placement.single(p),
    "V": lambda p: Placement.wave(p),
    "interleaved": lambda p: Placement.interleaved(p, 2),
    "wave of three": lambda p: Placement.wave(p, 3),
    "any": lambda p: Placement((0, *range(p), 0)),
}


def drawn(rng: Random, n_layers: int, *, limited: bool) -> LayerCosts:
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
        m_fixed=tuple(0.3 * rng.random() for _ in range(n_layers)),
        loss=rng.random(),
        pass_f=rng.choice((0.0, rng.random())),
        pass_b=rng.choice((0.0, rng.random())),
        pass_w=rng.choice((0.0, rng.random())),
        limit=rng.uniform(0.2, 1.6) * n_layers if limited else None,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limited", [False, True])
def test_no_split_has_a_lower_largest_load(kind: str, limited: bool) -> None:
    rng = Random(f"{kind} {limited}")
    refused = 0
    for _ in range(30):
        placement = KINDS[kind](rng.choice((1, 2, 3, 4)))
        n_chunks = placement.n_chunks
        n_layers = rng.randint(n_chunks, max(12, n_chunks))
        layers = drawn(rng, n_layers, limited=limited)
        m = rng.choice((1, 4))
        again = [i for i in range(n_layers) if rng.random() < 0.2]
        layers = LayerCosts(**{**vars(layers), "m_r": 0.1})
        in_flight = [rng.choice((1.0, 2.0)) for _ in range(n_chunks)]
        loads = Loads.of(layers, placement, m, recompute=again, in_flight=in_flight)
        least = min(
            (
                max(loads.by_stage(split)[0])
                for split in all_splits(n_layers, n_chunks)
                if loads.fits(split)
            ),
            default=math.inf,
        )
        try:
            found = balance(layers, placement, m, recompute=again, in_flight=in_flight)
        except LimitError as error:
            assert least == math.inf and limited
            assert error.smallest > layers.limit
            refused += 1
            continue
        assert found.is_proved
        assert found.load == pytest.approx(least, rel=1e-8)
        assert loads.fits(found.split) and sum(found.split) == n_layers
    assert refused < 25  # of 30: the limits bind, and leave something


def test_even_chunks_are_not_balanced() -> None:
    """The control: with a heavy head, the comparison above would tell them apart."""
    times = (0.5, *(1.0,) * 10, 3.0)
    layers = LayerCosts(n_layers=12, f=times, b=times, w=times)
    placement = Placement.single(3)
    loads = Loads.of(layers, placement, 1)
    even = max(loads.by_stage(even_split(12, 3))[0])
    assert even == pytest.approx(3 * 6)
    assert balance(layers, placement, 1).load == pytest.approx(3 * 5)


def test_a_stage_of_more_chunks_has_more_passes() -> None:
    """A stage with three chunks beside one with one: overheads move layers away."""
    placement = Placement((0, 1, 0, 2, 0))
    plain = LayerCosts(n_layers=12)
    heavy = LayerCosts(n_layers=12, pass_f=1.0, pass_w=2.0)
    loads = Loads.of(heavy, placement, 2)
    assert loads.by_stage([2, 3, 2, 3, 2])[0] == [6 * 6 + 3 * 6, 3 * 6 + 6, 3 * 6 + 6]
    assert loads.total == 12 * 6 + 5 * 6
    assert balance(plain, placement, 2).load == 4 * 6
    found = balance(heavy, placement, 2)
    assert found.is_proved and found.load == 5 * 6 + 6
    assert sum(found.split[i] for i in (0, 2, 4)) == 3


def test_of_equal_largest_loads_the_most_level_split_is_taken() -> None:
    times = (1.0,) * 7 + (6.0,)  # the head fills its stage, 7 layers are left for two
    layers = LayerCosts(n_layers=8, f=times, b=0.0, w=0.0)
    assert sorted(balance(layers, Placement.single(3), 1).split) == [1, 3, 4]
    assert balance(layers, Placement.single(3), 1).load == 6.0


@pytest.mark.parametrize(
    ("placement", "n_layers"),
    [
        (Placement.single(64), 128),
        (Placement.wave(8), 64),
        (Placement.interleaved(4, 2), 64),
    ],
)
def test_large_models_are_balanced_exactly(placement: Placement, n_layers: int) -> None:
    """No split of these can be listed; a lower load is refused by the bisection."""
    rng = Random(0)
    times = tuple(rng.uniform(0.5, 2) for _ in range(n_layers))
    layers = LayerCosts(n_layers=n_layers, f=times, b=times, w=times)
    found = balance(layers, placement, 8)
    assert found.is_proved
    assert found.load >= Loads.of(layers, placement, 8).least
    mean = 8 * 3 * sum(times) / placement.n_stages
    assert found.load <= mean * (1.02 if placement.n_stages < 64 else 1.4)


def test_the_three_kinds_with_two_chunks_are_told_apart_from_others() -> None:
    assert is_two_chunks(Placement.wave(3)) and is_two_chunks(Placement((2, 0, 1) * 2))
    assert is_two_chunks(Placement((0, 0)))
    assert not is_two_chunks(Placement((0, 0, 1, 1)))
    assert not is_two_chunks(Placement.wave(2, 3))
