"""A profile finds what layers take, and a plan or a prediction made of it comes true.

Most tests have a clock that only layers advance: all times are exact.
Between processes layers sleep, which gives lower bounds.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import zbpp
from zbpp import diagnostics
from zbpp.core import (
    Costs,
    Lane,
    PassKind,
    Placement,
    RequestError,
)
from zbpp.emulation import emulated_batch, emulated_pipeline
from zbpp.profiling import Profile

WIDTH = 8
FORWARD_MS = {"attention": 3, "dispatch": 2, "experts": 5, "combine": 1}
BACKWARD_MS = {"attention": 4, "dispatch": 3, "experts": 6, "combine": 2}
LOSS = 7
"""All in ms."""


class Clock:
    """The time, in place of `time.perf_counter`."""

    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> float:
        return self.ms / 1e3


CLOCK = Clock()


class _Takes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        CLOCK.ms += FORWARD_MS[name]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        CLOCK.ms += BACKWARD_MS[ctx.name]
        return dy.clone(), None


def takes(x: Tensor, name: str) -> Tensor:
    """Hand on a tensor, and let the time go by."""
    result: Tensor = _Takes.apply(x, name)
    return result


def plainly(communicate: Callable[..., Tensor], *args: Any) -> Tensor:
    """The control of `zbpp.overlap_point`."""
    return communicate(*args)


class Ticking(nn.Module):
    """attention | dispatch | experts | combine, and no communication where not asked.

    Args:
        point: what calls each communication; None: there is none.
    """

    def __init__(self, point: Callable[..., Tensor] | None) -> None:
        super().__init__()
        self.point = point
        self.attention, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = takes(self.attention(x), "attention")
        if self.point is not None:
            x = self.point(takes, x, "dispatch")
        x = takes(self.experts(x), "experts")
        return x if self.point is None else self.point(takes, x, "combine")


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    CLOCK.ms += LOSS
    return nn.functional.mse_loss(outputs, targets)


def layers(point: Callable[..., Tensor] = zbpp.overlap_point) -> list[nn.Module]:
    """Make a first layer that does not communicate, and three that do."""
    return [Ticking(None), *(Ticking(point) for _ in range(3))]


C, N = Lane.COMPUTE, Lane.NETWORK
F, B = PassKind.F, PassKind.B


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", CLOCK)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def pipeline_of(
    model: list[nn.Module], mode: str = "ZBV", n_stages: int = 2, **more: Any
) -> zbpp.Pipeline:
    settings: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": sgd, **more}
    return zbpp.Pipeline(
        model, mode, n_stages=n_stages, n_microbatches=2, device="cpu", **settings
    )


def profiled(model: list[nn.Module], mode: str = "ZBV", **more: Any) -> Profile:
    x = torch.randn(4, WIDTH)
    with pipeline_of(model, mode, **more) as pipeline:
        return diagnostics.profile(pipeline, x, x, rounds=5)


def close(parts: Any) -> Any:
    """Parts up to rounding, which may leave something of a loss that is taken off."""
    return [(lane, pytest.approx(time)) for lane, time in parts if time > 1e-9]


QUIET = [(C, 8)], [(C, 10)]
FORWARD = [(C, 3), (N, 2), (C, 5), (N, 1)]
BACKWARD = [(N, 2), (C, 6), (N, 3), (C, 4)]

pytestmark = pytest.mark.usefixtures("clock")


def test_layers_have_their_times_and_the_parts_between_their_marks() -> None:
    profile = profiled(layers())
    assert profile.layers.of("f") == pytest.approx((8, 11, 11, 11))
    assert profile.layers.of("b") == pytest.approx((10, 15, 15, 15))
    assert profile.layers.loss == pytest.approx(LOSS)
    parts = profile.layers.parts
    assert isinstance(parts, tuple) and len(parts) == 4
    assert (close(parts[0].f), close(parts[0].b)) == QUIET
    for talking in parts[1:]:
        assert close(talking.f) == FORWARD, "without the loss, which the last one has"
        assert close(talking.b) == BACKWARD
    assert [[lane for lane, _ in each.w] for each in parts] == [[C]] * 4


def test_a_profile_needs_a_mode_that_splits_the_backward() -> None:
    with pytest.raises(RequestError, match=r"runs B and W as one pass.*ZBH1"):
        profiled(layers(), "1F1B")


def test_a_profile_is_a_table() -> None:
    profile = profiled(layers())
    assert profile.layers.of("message") == (2 * WIDTH * 4.0,) * 3
    assert profile.chunks()[1]["times"]["F"].median == pytest.approx(11)
    assert len(profile.table.splitlines()) >= 4 + 3


def test_chunks_of_any_split_follow_from_their_layers() -> None:
    profile = profiled(layers(), "ZBH1")
    costs = profile.costs()
    assert isinstance(costs.parts, tuple)
    first, last = costs.on(Placement.single(2)).parts
    assert close(first.f) == [(C, 8 + 3), (N, 2), (C, 5), (N, 1)]
    assert close(first.b) == [(N, 2), (C, 6), (N, 3), (C, 4 + 10)]
    assert close(last.b) == BACKWARD * 2
    for kind in (F, B):
        sums = [each.time(kind) for each in costs.on(Placement.single(2)).parts]
        means = [each["times"][str(kind)].mean for each in profile.chunks()]
        assert sums == pytest.approx(means)
    other = profile.costs(Placement.single(2), [1, 3])
    assert other.f == pytest.approx((8, 33))
    with pytest.raises(RequestError, match="split"):
        profile.costs(Placement.single(2), [1, 1])


def test_layers_without_overlap_points_have_no_parts() -> None:
    """The control: the same times."""
    marked, plain = profiled(layers()), profiled(layers(plainly))
    assert plain.layers.parts is None and plain.costs().parts is None
    assert "layer 1 communicates in F 3.000 of 11.000 ms, in B 5.000 of" in marked.table
    assert "communicates" not in plain.table
    assert plain.layers.f == pytest.approx(marked.layers.f)
    assert plain.layers.b == pytest.approx(marked.layers.b)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_for_an_example_has_parts_if_they_may_overlap(overlap: bool) -> None:
    plan = zbpp.plan_model(
        layers(), "DualPipeV", n_stages=2, n_microbatches=4, loss_fn=loss_fn,
        example=(torch.randn(4, WIDTH), torch.randn(4, WIDTH)), device="cpu",
        execution=zbpp.Execution(overlap=overlap),
    )  # fmt: skip
    assert (plan.schedule.parts is not None) == overlap
    assert plan.costs.f[1] == pytest.approx(11)


class SlowerBehindAnother(Ticking):
    """Takes 4 ms more if its input has a graph: in a chunk, and not alone."""

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.ms += 4 if x.grad_fn is not None else 0
        return super().forward(x)


def test_the_overhead_of_a_chunk_is_computed() -> None:
    first, _ = layers()[:2]
    model = [first, SlowerBehindAnother(zbpp.overlap_point), *layers()[2:]]
    parts = profiled(model, "ZBH1").layers.parts_of(1)
    assert parts.on_lane(F, N) == pytest.approx(2 + 1)
    assert parts.time(F) == pytest.approx(11 * (8 + 11 + 4) / (8 + 11))


def test_costs_of_the_last_steps_are_those_of_the_layers() -> None:
    x = torch.randn(4, WIDTH)
    with pipeline_of(layers(), "ZBH1") as pipeline:
        for _ in range(3):
            pipeline.step(x, x)
        costs = diagnostics.measured_costs(pipeline, 2)
        assert costs.f == pytest.approx((8 + 11, 11 + 11 + LOSS))
        assert costs.b == pytest.approx((10 + 15, 15 + 15))
        assert costs.w == pytest.approx((0, 0))
        found = diagnostics.prediction(pipeline)
        assert found.step_measured is None, "two stages in one process take turns"
        assert found.line.startswith("prediction (simulated with the costs of the last")
    with pipeline_of(layers(), "1F1B") as pipeline:
        pipeline.step(x, x)
        with pytest.raises(RequestError, match="as one pass"):
            diagnostics.measured_costs(pipeline)
        joint = diagnostics.measured_costs(pipeline, joint=True)
        assert joint.b == pytest.approx((10 + 15, 15 + 15))


@pytest.mark.parametrize(("slower", "away"), [(1.0, "+0.0%"), (0.8, "+25.0%")])
def test_a_run_takes_what_its_profile_predicts(slower: float, away: str) -> None:
    """The control: of costs that are too low the difference is in the line."""
    x = torch.randn(4, WIDTH)
    with pipeline_of(layers(), "ZBH1", n_stages=1) as pipeline:
        costs = diagnostics.profile(pipeline, x, x, rounds=5).costs()
        for _ in range(3):
            pipeline.step(x, x)
        low = {name: slower * getattr(costs, name)[0] for name in ("f", "b", "w")}
        given = Costs(**low, loss=slower * costs.loss)
        found = diagnostics.prediction(pipeline, given)
    step = 2 * (4 * 0 + 8 + 10 + 3 * (11 + 15) + LOSS)
    assert found.step_measured == pytest.approx(step)
    assert found.step_predicted == pytest.approx(slower * step)
    assert f"measured ({away})" in found.line.replace("-0.0", "+0.0")


def test_a_stage_whose_w_has_nothing_to_do_is_named() -> None:
    def splits(*parts: nn.Module) -> tuple[bool, ...]:
        profile = profiled(list(parts), "ZBH1", optimizer=None)
        found = profile.steps.splits
        assert profile.costs().splits == (None if all(found) else found)
        return found

    linear, norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    assert splits(linear, norm) == (True, False)
    assert splits(linear, nn.Linear(WIDTH, WIDTH)) == (True, True)


def weights_of(model: list[nn.Module]) -> list[Any]:
    """Of a model that has a buffer in its last layer."""
    return [x.tolist() for layer in model for x in layer.state_dict().values()]


def test_a_profile_trains_and_a_plan_leaves_the_weights() -> None:
    """The control: the same steps without a plan around them."""
    x, model = torch.randn(4, WIDTH), [*layers(), nn.BatchNorm1d(WIDTH)]
    before = weights_of(model)
    zbpp.plan_model(
        model, "ZBV", n_stages=2, n_microbatches=2, loss_fn=loss_fn, optimizer=sgd,
        example=(x, x), device="cpu",
    )  # fmt: skip
    assert weights_of(model) == before
    assert all(p.grad is None for layer in model for p in layer.parameters())
    with pipeline_of(model) as pipeline:
        with pytest.raises(RequestError, match="rounds is 0"):
            diagnostics.profile(pipeline, x, x, rounds=0)
        diagnostics.profile(pipeline, x, x, rounds=1)
    assert weights_of(model) != before


COSTS = Costs(
    f=(4.0, 6.0), b=(8.0, 3.0), w=(2.0, 5.0), comm=3.0, optimizer=(5.0, 9.0),
    reduction=4.0,
)  # fmt: skip


def emulated(mode: str) -> Profile:
    schedule = zbpp.plan(mode, n_stages=2, n_microbatches=2)
    pipeline = emulated_pipeline(schedule, COSTS, post_validation=False)
    batch = emulated_batch(pipeline)
    profile = diagnostics.profile(pipeline, batch, batch, rounds=5)
    pipeline.step(batch, batch)
    pipeline.close()
    return profile


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_measure_layers_that_sleep(pool: Pool) -> None:
    """Never less, however busy the machine is."""
    first, second = pool.run(emulated, 2, "ZBH1")
    assert first.table == second.table, "every rank has the whole profile"
    costs = first.costs()
    for name in ("f", "b", "w", "optimizer"):
        for found, given in zip(
            getattr(costs, name), getattr(COSTS, name), strict=True
        ):
            # the loss is a part of the last F, which sleeps as a whole
            loss = costs.loss if (name, given) == ("f", COSTS.f[-1]) else 0.0
            assert found + loss >= given - 1e-9
    assert costs.reduction >= 4.0
    assert costs.on(Placement.single(2)).hops[0] > 0
    (pair, link), *more = first.steps.wires.links.items()
    assert (pair, more) == ((0, 1), [])
    assert link.alpha >= 2.999 and link.bandwidth > 0
