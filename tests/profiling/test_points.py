"""Layers that name their communication: a profile tells the parts of their passes.

The clock goes on where the layers say so (`ticking`), so all times are exact.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from ticking import CLOCK, LOSS, WIDTH, Ticking, layers, loss_fn, plainly, takes
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zbpp
from zbpp.cli import main
from zbpp.core import (
    Lane,
    Parts,
    PassKind,
    Placement,
    read_costs,
    read_layers,
    write_costs,
    write_layers,
)
from zbpp.profiling import Profile
from zbpp.profiling.points import layer_parts
from zbpp.training.options import TrainOptions
from zbpp.training.profiled import run_profile
from zbpp.training.setup import plan_of
from zbpp.training.user_model import load_model

C, N = Lane.COMPUTE, Lane.NETWORK
F, B = PassKind.F, PassKind.B


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.perf_counter", CLOCK)


def profiled(model: list[nn.Module], mode: str = "ZBV") -> Profile:
    pipeline = flat_pipeline(
        model,
        schedule=mode,
        n_stages=2,
        n_microbatches=2,
        loss_fn=loss_fn,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    x = torch.randn(4, WIDTH)
    profile = pipeline.profile(x, x, rounds=5, memory=False)
    pipeline.close()
    return profile


def close(parts: Any) -> Any:
    """Parts up to rounding, which may leave something of a loss that is taken off."""
    return [(lane, pytest.approx(time)) for lane, time in parts if time > 1e-9]


QUIET = [(C, 8)], [(C, 10)]
FORWARD = [(C, 3), (N, 2), (C, 5), (N, 1)]
BACKWARD = [(N, 2), (C, 6), (N, 3), (C, 4)]


def test_the_parts_of_layers_are_those_between_their_marks() -> None:
    parts = profiled(layers()).layers.parts
    assert isinstance(parts, tuple) and len(parts) == 4
    assert (close(parts[0].f), close(parts[0].b)) == QUIET
    for talking in parts[1:]:
        assert close(talking.f) == FORWARD, "without the loss, which the last one has"
        assert close(talking.b) == BACKWARD
    assert [[lane for lane, _ in each.w] for each in parts] == [[C]] * 4


def test_a_chunk_has_the_parts_of_its_layers_in_their_order() -> None:
    profile = profiled(layers(), "ZBH1")
    costs = profile.costs()
    assert isinstance(costs.parts, tuple)
    first, last = costs.parts
    assert close(first.f) == [(C, 8 + 3), (N, 2), (C, 5), (N, 1)]
    assert close(first.b) == [(N, 2), (C, 6), (N, 3), (C, 4 + 10)]
    assert close(last.b) == BACKWARD * 2
    assert costs.loss == pytest.approx(LOSS)
    for kind in (F, B):
        sums = [each.time(kind) for each in costs.on(Placement.single(2)).parts]
        means = [each.times[str(kind)].mean for each in profile.chunks]
        assert sums == pytest.approx(means)


def test_layers_that_mark_nothing_have_no_parts(tmp_path: Path) -> None:
    """The control: the same times, in files without parts."""
    marked, plain = profiled(layers()), profiled(layers(plainly))
    assert plain.layers.parts is None and "communicates" not in plain.table
    assert plain.layers.f == pytest.approx(marked.layers.f)
    assert plain.layers.b == pytest.approx(marked.layers.b)
    costs, of_layers = tmp_path / "costs.json", tmp_path / "layers.json"
    write_costs(plain.costs(), costs)
    write_layers(plain.layers, of_layers)
    for file in (costs, of_layers):
        assert "parts" not in json.loads(file.read_text())


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_for_an_example_has_parts_if_they_may_overlap(overlap: bool) -> None:
    plan = zbpp.plan_model(
        layers(), "DualPipeV", n_stages=2, n_microbatches=4, loss_fn=loss_fn,
        example=(torch.randn(4, WIDTH), torch.randn(4, WIDTH)), device="cpu",
        execution=zbpp.Execution(overlap=overlap),
    )  # fmt: skip
    assert (plan.schedule.parts is not None) == overlap
    assert plan.costs.f[1] == pytest.approx(11)


class Checkpointed(Ticking):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def test_what_a_recomputed_forward_communicates_counts_as_computing() -> None:
    model = [nn.Linear(WIDTH, WIDTH), Checkpointed(zbpp.overlap_point)]
    parts = profiled(model, "ZBH1").layers.parts_of(1)
    assert close(parts.f) == FORWARD
    assert parts.on_lane(B, N) == pytest.approx(2 + 3)
    up_to_experts = 3 + 2  # no operand comes later
    assert parts.on_lane(B, C) == pytest.approx(6 + 4 + up_to_experts)


def test_points_that_are_not_there_in_every_pass_are_not_told() -> None:
    class AtTimes(Ticking):
        n = 0

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            communicate: Callable[..., Tensor] = zbpp.overlap_point
            return (
                takes(x, "experts") if self.n % 3 else communicate(takes, x, "combine")
            )

    model = [*layers()[:2], AtTimes(None), nn.Linear(WIDTH, WIDTH)]
    profile = profiled(model)
    assert [lane for lane, _ in profile.layers.parts_of(2).f] == [C]
    assert close(profile.layers.parts_of(1).f) == FORWARD


def test_what_a_step_adds_is_computed() -> None:
    alone = {"F": (2.0, 1.0, 2.0, 1.0, 0.2), "B": (0.0, 3.0)}
    (slower,) = (
        layer_parts([alone], [{"F": 6.5, "B": 5.0, "W": 1.0, "loss": 0.1}]) or ()
    )
    assert close(slower.f) == close(
        ((C, 4.5 * 2 / 4.1), (N, 1), (C, 4.5 * 2 / 4.1), (N, 1), (C, 4.5 * 0.1 / 4.1))
    )
    assert slower.b == ((C, 2.0), (N, 3.0)) and slower.w == ((C, 1.0),)
    (faster,) = (
        layer_parts([alone], [{"F": 1.0, "B": 2.0, "W": 0.0, "loss": 0.0}]) or ()
    )
    assert faster == Parts(((N, 0.5), (N, 0.5)), ((N, 2.0),), ((C, 0.0),))
    whole = {"F": (2.0,), "B": (3.0,)}
    assert layer_parts([whole], [{"F": 1.0, "B": 1.0, "W": 1.0, "loss": 0.0}]) is None


def test_the_files_of_the_command_are_planned_on_two_lanes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = ["DualPipeV", "--stages", "2", "--microbatches", "4"]
    options = TrainOptions(pipeline_schedule_mode="DualPipeV", stages=2, microbatches=4)
    run_profile(  # both stages in this process, which has the clock
        options,
        plan_of(options),
        load=lambda: load_model("ticking:build", seq=1, samples=4),
        out=Path("costs.json"),
        layers_out=Path("layers.json"),
        rounds=2,
        as_json=False,
    )
    told = capsys.readouterr().out
    assert "layer 1 communicates in F 3.000 of 11.000 ms, in B 5.000 of 15.000" in told
    assert "layer 0 communicates" not in told
    of_layers, costs = read_layers("layers.json"), read_costs("costs.json")
    assert of_layers.on(Placement.wave(2, 2), (1, 1, 1, 1)).parts == costs.parts

    whole = json.loads(Path("costs.json").read_text())
    del whole["parts"]  # as it was before there were any
    Path("whole.json").write_text(json.dumps(whole))
    spans = {}
    for file in ("costs.json", "layers.json", "whole.json"):
        flag = "--layers" if file == "layers.json" else "--costs"
        assert main(["plan", *sizes, flag, file, "--out", "plan.json"]) == 0
        is_laid_out = "1F0.1~" in Path("plan.json").read_text()
        assert is_laid_out == (file != "whole.json"), "part 1 of F is on the network"
        capsys.readouterr()
        assert main(["show", "plan.json", "--json", "--costs", "costs.json"]) == 0
        spans[file] = json.loads(capsys.readouterr().out)["span"]
    assert spans["costs.json"] == spans["layers.json"] < spans["whole.json"]
