"""Random pipelines whose passes have peaks, whose B's add memory, with fixed parts."""

import random

from zbpp.core import Costs, Placement
from zbpp.schedules.planner.limits import needs

__all__ = ["random_case", "random_limit"]


def random_case(rng: random.Random, p: int, v: int) -> tuple[Costs, Costs]:
    """Times and memories of p stages with v chunks each; no limit."""
    n = p * v

    def amounts(low: float, high: float) -> float | tuple[float, ...]:
        if rng.random() < 0.4:
            return round(rng.uniform(low, high) * v, 3)
        return tuple(round(rng.uniform(low, high), 3) for _ in range(n))

    def picked(*shares: float) -> tuple[float, ...]:
        return tuple(rng.choice(shares) for _ in range(n))

    m_b = tuple(round(rng.uniform(0.1, 1.5), 3) for _ in range(n))
    m_w = tuple(b * s for b, s in zip(m_b, picked(0, 0.5, 1, 1, 2, 5), strict=True))
    rises = [max(0.0, w - b) for b, w in zip(m_b, m_w, strict=True)]
    some = {
        "peak_f": tuple(b * s for b, s in zip(m_b, picked(1, 1, 1.5, 4), strict=True)),
        "peak_b": tuple(
            r + s for r, s in zip(rises, picked(0, 0, 0.3, 2), strict=True)
        ),
        "peak_w": picked(0, 0, 0.3, 3),
        "peak_bw": picked(0, 0.3, 2),
        "peak_o": picked(0, 0, 0.3, 6),
        "m_fixed": picked(0, 1, 30),
    }
    splits = tuple(rng.random() < 0.6 for _ in range(p))
    costs = Costs(
        amounts(0.5, 2),
        amounts(0.5, 2),
        amounts(0.2, 2),
        comm=rng.choice((0.0, 0.1, 0.6)),
        splits=splits if rng.random() < 0.2 else None,
    )
    given = {key: value for key, value in some.items() if rng.random() < 0.6}
    return costs, Costs(m_b=m_b, m_w=m_w, **given)


def random_limit(
    rng: random.Random, placement: Placement, costs: Costs, memory: Costs
) -> tuple[float, ...] | None:
    """A limit: none, the smallest that can work, a little more, or much more."""
    kind = rng.choice(("none", "smallest", "little", "much"))
    if kind == "none":
        return None
    p = placement.n_stages
    held = costs.with_memory(memory).on(placement).joined()
    more = {"smallest": 0.0, "little": rng.uniform(0, 0.3), "much": rng.uniform(0, 2)}
    m_b = sum(held.m_b) / p
    return tuple(
        need + more[kind] * (m_b if kind == "little" else p * m_b)
        for need in needs(held)
    )
