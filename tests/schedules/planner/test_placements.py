"""Any placement is planned by the same rules: laws on random ones, and VPP's."""

import pickle
import random

import pytest

from zbpp.core import (
    Costs,
    LimitError,
    MemoryModel,
    Pass,
    PassKind,
    Placement,
    Schedule,
    ScheduleError,
    lower_bound,
    peaks,
)
from zbpp.schedules import plan_placement, plan_vpp, plan_wave
from zbpp.simulator import simulate, span


def random_placement(rng: random.Random) -> Placement:
    p, v = rng.randint(1, 6), rng.choice((1, 2, 2, 3))
    stage_of = list(range(p)) * v
    match rng.choice(("interleaved", "shuffled", "blocks", "uneven")):
        case "shuffled":
            rng.shuffle(stage_of)
        case "blocks":
            stage_of.sort()
        case "uneven":
            stage_of += rng.choices(range(p), k=rng.randint(0, 4))
            rng.shuffle(stage_of)
    return Placement(tuple(stage_of))


def random_case(seed: int) -> dict:
    rng = random.Random(seed)
    placement = random_placement(rng)
    n = placement.n_chunks

    def spread(value: float) -> tuple[float, ...]:
        return tuple(value * rng.uniform(0.5, 1.5) for _ in range(n))

    edges = tuple(rng.choice((0.0, 0.1, 1.0)) for _ in range(n - 1))
    m_b, share = spread(1.0), rng.choice((0.0, 0.4, 1.0))
    least = [sum(m_b[chunk] for chunk in own) for own in placement.chunks_of]
    return {
        "placement": placement,
        "n_microbatches": rng.randint(1, 12),
        "costs": Costs(
            *(spread(1.0), spread(1.0), spread(rng.choice((0.0, 0.5, 1.0)))),
            comm=rng.choice((0.0, 0.3, edges)),
            loss=rng.choice((0.0, 0.4)),
            splits=tuple(rng.random() < 0.8 for _ in least),
        ),
        "memory": MemoryModel(
            m_b,
            tuple(share * held for held in m_b),
            tuple(one * rng.choice((1.0, 1.3, 2.0, len(least))) for one in least),
        ),
    }


@pytest.mark.parametrize("first", range(0, 150, 50))
def test_random_placements_keep_order_memory_and_bounds(first):
    for seed in range(first, first + 50):
        case = random_case(seed)
        schedule = plan_placement(**case, effort="fast")
        sizes = case["placement"], case["n_microbatches"]
        judged = Schedule("judge", *sizes, schedule.orders, case["memory"])
        bound = lower_bound(*sizes, case["costs"], case["memory"])
        assert bound <= span(simulate(judged, case["costs"])) * (1 + 1e-9)
        for splits, order in zip(case["costs"].splits, judged.orders, strict=True):
            kinds = {job.kind for job in order if isinstance(job, Pass)}
            assert (PassKind.BW in kinds) != splits


def test_the_search_takes_stages_of_any_number_of_chunks():
    for seed in range(12):
        case = random_case(seed)
        spans = [
            span(simulate(plan_placement(**case, effort=effort), case["costs"]))
            for effort in ("fast", "default")
        ]
        assert spans[1] <= spans[0] * (1 + 1e-9)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 4, 2), (4, 8, 2), (4, 16, 2), (4, 8, 3)])
@pytest.mark.parametrize("costs", [Costs(), Costs(1.0, 1.5, 0.5, 0.2, loss=0.5)])
def test_interleaved_plans_are_shorter_than_vpp_in_the_same_memory(p, m, v, costs):
    vpp = plan_vpp(n_stages=p, n_microbatches=m, chunks_per_stage=v)
    unit = MemoryModel().on(vpp.placement)
    memory = MemoryModel(limit=max(peaks(vpp.orders, unit)))
    planned = plan_placement(
        placement=vpp.placement,
        n_microbatches=m,
        costs=costs,
        memory=memory,
        effort="fast",
    )
    assert planned.placement == Placement.interleaved(p, v)
    assert span(simulate(planned, costs)) < span(simulate(vpp, costs))
    assert max(peaks(planned.orders, unit)) <= memory.limit * (1 + 1e-9)
    with pytest.raises(ScheduleError, match="over the limit"):  # control: 1 less
        less = MemoryModel(limit=max(peaks(planned.orders, unit)) - 0.1)
        Schedule("less", planned.placement, m, planned.orders, less)


def test_a_wave_is_a_placement():
    wave = plan_wave(n_stages=3, n_microbatches=5, name="x", effort="fast")
    same = plan_placement(
        placement=Placement.wave(3), n_microbatches=5, name="x", effort="fast"
    )
    assert wave == same


def test_a_limit_that_holds_no_microbatch_names_the_smallest_that_does():
    request = {
        "placement": Placement((0, 1, 0)),
        "n_microbatches": 2,
        "memory": MemoryModel(m_b=(1.0, 1.0, 2.0), m_w=0.5, limit=2.5),
    }
    with pytest.raises(
        LimitError, match=r"memory 3 on stage 0, over the limit 2\.5; the smal"
    ) as error:
        plan_placement(**request)
    assert error.value.smallest == 3
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)
    request["memory"] = MemoryModel(m_b=(1.0, 1.0, 2.0), m_w=0.5, limit=3)
    assert plan_placement(**request).n_stages == 2
