"""A profile finds what layers, links and optimizers take, on one process and on more.

Layers that sleep give lower bounds, which hold on a busy machine too.
"""

import json
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zbpp.core import Costs, PassKind, Placement, RequestError, Slot
from zbpp.emulation.layers import EmulatedLayer
from zbpp.emulation.run import emulated_batch, emulated_pipeline
from zbpp.pipeline import Pipeline
from zbpp.planning import plan
from zbpp.profiling import Profile
from zbpp.profiling.links import Link, fit, link_list
from zbpp.profiling.rehearsal import rehearsed_steps
from zbpp.profiling.step_times import measure_step_times
from zbpp.runtime.comm.ping import Ping
from zbpp.simulator import simulate

COSTS = Costs(
    f=(4.0, 6.0), b=(8.0, 3.0), w=(2.0, 5.0), comm=3.0, optimizer=(5.0, 9.0),
    reduction=4.0,
)  # fmt: skip


def emulated(mode: str) -> dict[str, Any]:
    schedule = plan(mode, n_stages=2, n_microbatches=2)
    pipeline = emulated_pipeline(schedule, COSTS, post_validation=False)
    batch = emulated_batch(pipeline)
    profile = pipeline.profile(batch, batch, rounds=5)
    pipeline.step(batch, batch)
    pipeline.close()
    return profile.as_dict() | {"costs": profile.costs()}


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_find_the_costs_of_layers_that_sleep(pool: Any) -> None:
    first, second = pool.run(emulated, 2, "ZBH1")
    assert first == second, "every rank has the whole profile"
    costs = first["costs"]
    for name in ("f", "b", "w"):
        for found, given in zip(
            getattr(costs, name), getattr(COSTS, name), strict=True
        ):
            assert found >= given
    assert costs.f[0] + 1 < costs.b[0], "F and B are told apart"
    for found, given in zip(costs.optimizer, COSTS.optimizer, strict=True):
        assert found >= given
    assert costs.reduction >= 4.0
    assert costs.on(Placement.single(2)).hops[0] > 0
    ((link,)) = first["links"]
    assert link["delay"] >= 2.999
    assert link["stages"] == [0, 1] and link["bandwidth"] > 0


def rehearsed(shape: tuple[int, int]) -> tuple[Profile, list[float], bool]:
    """A profile with a batch of its own, then a step; the parameters before it."""
    torch.manual_seed(1)
    pipeline = flat_pipeline(
        [nn.Linear(8, 8) for _ in range(4)],
        loss_fn=nn.functional.mse_loss, optimizer=torch.optim.Adam,
        schedule="ZBV", n_microbatches=2, device="cpu",
    )  # fmt: skip
    before = [p.detach().clone() for _, p in pipeline.named_parameters()]
    x = torch.randn(shape)
    profile = pipeline.profile(x, x, rounds=1)
    after = [p for _, p in pipeline.named_parameters()]
    same = all(map(torch.equal, before, after))
    torch.manual_seed(2)
    x = torch.randn(8, 8)
    losses = [pipeline.step(x, x).loss for _ in range(2)]
    pipeline.close()
    return profile, losses, same


@pytest.mark.dist
def test_a_rehearsal_leaves_no_trace_and_fixes_no_shape(pool: Any) -> None:
    first, _ = pool.run(rehearsed, 2, (24, 8))
    other, _ = pool.run(rehearsed, 2, (8, 8))
    assert first[2] and first[1] == other[1], "the same step after either profile"
    profile = first[0]
    assert min(profile.layers.pass_f, profile.layers.pass_b) > 0
    costs = profile.costs()
    for name in ("f", "b", "w"):
        pairs = zip(getattr(costs, name), profile.chunks, strict=True)
        for chunk, (found, one) in enumerate(pairs):
            more = costs.loss if (name, chunk) == ("f", 3) else 0.0
            assert found + more == pytest.approx(one.times[name.upper()].mean)


@pytest.mark.parametrize("mode", ["ZBH1", "1F1B"])
def test_a_rehearsal_tells_passes_gaps_and_waits(mode: str) -> None:
    schedule = plan(mode, n_stages=2, n_microbatches=4)
    rows = {  # jobs end earlier by the host's gap
        stage: [[Slot(s.job, s.start / 1e3, (s.end - 0.5) / 1e3) for s in row]]
        for stage, row in enumerate(simulate(schedule, COSTS).rows)
    }
    assert rehearsed_steps({0: rows[0]}, schedule) is None
    steps = rehearsed_steps(rows, schedule)
    assert steps is not None
    links = {(0, 1): Link(1.0, 100.0, 0.0)}
    seen, apart = (
        measure_step_times(steps, links, message_bytes=0, one_clock=one_clock)
        for one_clock in (True, False)
    )
    assert seen.gaps == pytest.approx((0.5, 0.5))
    assert seen.mean(PassKind.F, 1) == pytest.approx(6.0 - 0.5)
    assert seen.waits == {(0, 1): pytest.approx(COSTS.comm)}
    assert apart.waits == {}, "the control: two clocks"


def layers() -> list[nn.Module]:
    return [
        nn.Sequential(nn.Linear(64, 64 * width), nn.Linear(64 * width, 64))
        for width in (1, 64, 1, 1)
    ]


def profiled(*, memory: bool = True, **more: Any) -> Profile:
    settings: dict[str, Any] = {"schedule": "ZBV", "n_stages": 2, "n_microbatches": 2}
    pipeline = flat_pipeline(
        layers(),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1),
        **{**settings, **more},
    )
    x = torch.randn(128, 64)
    return pipeline.profile(x, x, rounds=5, memory=memory)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profiled()


class ClockOfNumbers(TorchDispatchMode):
    """A clock that goes on by the numbers that operations touch, not by the time."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        touched = tree_leaves((args, kwargs, result))
        numbers = sum(one.numel() for one in touched if isinstance(one, torch.Tensor))
        self.read += 1e-9 * numbers
        return result


def test_a_heavy_layer_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with ClockOfNumbers() as clock:
        monkeypatch.setattr("time.perf_counter", lambda: clock.read)
        profile = profiled(memory=False)
    for name in ("f", "b", "w", "optimizer"):
        times = profile.layers.of(name)
        assert max(times) == times[1] > 8 * max(times[:1] + times[2:])
    assert profile.layers.of("message") == (64 * 64 * 4.0,) * 3


def test_the_layers_of_a_chunk_add_up_to_it() -> None:
    profile = profiled(schedule="ZBH1")
    costs = profile.costs()
    for chunk, name in ((0, "f"), (1, "b"), (1, "w")):
        (found,) = {getattr(costs, name)[chunk]}
        assert found == pytest.approx(profile.chunks[chunk].times[name.upper()].mean)
    last = profile.chunks[1].times["F"].mean
    assert costs.f[1] + costs.loss == pytest.approx(last) and costs.loss > 0
    assert sum(costs.optimizer) == pytest.approx(
        sum(one.mean for one in profile.optimizer)
    )


def test_other_splits_and_placements_follow(profile: Profile) -> None:
    costs = profile.costs(Placement.single(2), [1, 3])
    f, more = profile.layers.of("f"), profile.layers.pass_f
    assert more > 0, "to cut a graph takes some time"
    assert costs.f == pytest.approx((f[0] + more, sum(f[1:]) + more))
    with pytest.raises(RequestError, match="split"):
        profile.costs(Placement.single(2), [1, 1])


def test_memory_is_that_of_the_allocator(profile: Profile) -> None:
    heavy = profile.chunks[1]
    kept = (64 + 64 * 64) * 64 * 4  # the two linears' inputs, of 64 samples
    assert heavy.left["F"] == pytest.approx(kept, rel=0.02)
    assert heavy.left["W"] < 0 < heavy.peak["F"]
    assert all(
        one.peak[k] >= max(0.0, one.left[k]) for one in profile.chunks for k in "FBW"
    )


def test_the_table_and_the_json_hold_every_figure(profile: Profile) -> None:
    assert len(profile.table.splitlines()) >= 4 + 3
    data = json.loads(json.dumps(profile.as_dict()))
    assert data["unit"] == {"time": "ms", "memory": "bytes"}
    assert data["chunks"][1]["times"]["F"]["median"] == pytest.approx(
        profile.chunks[1].times["F"].median
    )


def test_what_cannot_be_measured_is_refused() -> None:
    pipeline = Pipeline(
        layers(), loss_fn=nn.functional.mse_loss, optimizer=None, schedule="ZBH1",
        n_stages=2, n_microbatches=3,
    )  # fmt: skip
    with pytest.raises(RequestError, match="rounds is 0"):
        pipeline.profile(torch.randn(3, 64), torch.randn(3, 64), rounds=0)


def test_a_line_through_two_sizes_is_delay_and_bandwidth() -> None:
    pings = [Ping(2e-3, 1e-4)] * 5 + [Ping(0.5, 0.1)]
    link = fit((0, pings), (10**6, [Ping(4e-3, 2e-4)]))
    assert (link.delay, link.send) == pytest.approx((2.0, 0.2))
    assert link.time(500_000) == pytest.approx(3.0)
    level = fit((0, pings), (10**6, pings))
    assert level.time(10**9) == pytest.approx(2.0), "no size is slower"


def test_links_are_listed_as_costs_read_them() -> None:
    links = {(0, 1): Link(1, 9, 0), (1, 2): Link(2, 9, 0), (0, 2): Link(5, 9, 0)}
    assert link_list(links, 3, "delay") == (1, 2, 5)
    del links[0, 2]
    assert link_list(links, 4, "delay") == (1, 2, 1.5)
    assert link_list({}, 3, "delay") == 0.0


def test_a_stage_whose_w_has_nothing_to_do_is_named() -> None:
    def splits(*parts: nn.Module) -> tuple[bool, ...]:
        pipeline = Pipeline(
            list(parts), loss_fn=nn.functional.mse_loss, optimizer=None,
            schedule="ZBH1", n_stages=2, n_microbatches=2,
        )  # fmt: skip
        x = torch.randn(8, 4)
        profile = pipeline.profile(x, x, rounds=1)
        found = profile.costs().splits
        assert found == (None if all(profile.splits) else profile.splits)
        return profile.splits

    assert splits(nn.Linear(4, 4), nn.LayerNorm(4)) == (True, False)
    assert splits(nn.Linear(4, 4), nn.Linear(4, 4)) == (True, True)
    one, other = EmulatedLayer(0, 0, 0), EmulatedLayer(0, 0, 0)
    assert splits(one, other) == (True, True)
