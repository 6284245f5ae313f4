"""The planner's memory is that of the estimate: shared weights, files that change."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import zbpp
from zbpp.core import Placement, parse_layers, write_layers, write_schedule
from zbpp.memory import estimate, layer_memory
from zbpp.planning import PlanRequest
from zbpp.simulator import peak_memory, simulate

MIB = 2.0**20
loss_fn = nn.functional.cross_entropy


def tied_model(shared=(0, 7), n=8, width=16, words=2048):
    """An embedding and a head of one weight; or heads in the middle, too."""
    embedding = nn.Embedding(words, width)
    layers = [embedding, *(nn.Linear(width, width) for _ in range(n - 1))]
    for i in shared[1:]:
        layers[i] = nn.Linear(width, words, bias=False)
        layers[i].weight = embedding.weight
        if i < n - 1:
            layers[i] = nn.Sequential(layers[i], nn.Linear(words, width))
    return layers


def planned_and_estimated(layers, mode, n_stages=2, **more):
    tokens = torch.zeros(4, dtype=torch.long)
    batch = tokens, tokens
    memory = layer_memory(layers, batch, loss_fn, post_validation=mode == "ZBH1")
    costs = replace(memory, **more)
    sizes = {"n_stages": n_stages, "n_microbatches": 4}
    request = PlanRequest(schedule=mode, costs=costs, split="even", **sizes)
    plan = zbpp.make_plan(request)
    found = estimate(layers, batch, loss_fn, modes=[mode], **sizes)
    peaks = peak_memory(simulate(plan), plan.costs)
    return peaks, [stage.peak for stage in found.modes[mode]]


@pytest.mark.parametrize(
    ("mode", "shared", "n_stages"),
    [
        ("ZBH1", (0, 7), 2),
        pytest.param("1F1B", (0, 3, 7), 4, marks=pytest.mark.slow),
        pytest.param("ZBH1", (0, 3, 7), 4, marks=pytest.mark.slow),
    ],
)
def test_every_stage_with_a_shared_weight_holds_it(mode, shared, n_stages):
    planned, estimated = planned_and_estimated(tied_model(shared), mode, n_stages)
    for stage, (mine, true) in enumerate(zip(planned, estimated, strict=True)):
        assert mine >= 0.95 * true - 4096, stage
        assert mine <= 1.5 * true + 0.05 * MIB, stage
    forgotten, _ = planned_and_estimated(tied_model(shared), mode, n_stages, tied=())
    assert forgotten[-1] < 0.6 * estimated[-1]  # the control


def test_one_stage_holds_a_shared_weight_once():
    tokens = torch.zeros(4, dtype=torch.long)
    costs = layer_memory(tied_model(), (tokens, tokens), loss_fn)
    v, line = Placement.wave(2), Placement.single(2)
    together, apart = (
        sum(costs.on(placement, split).m_fixed)
        for placement, split in ((v, (2,) * 4), (line, (4, 4)))
    )
    size = costs.tied[0][-1]
    assert size == 2048 * 16 * 4
    # weight, gradient, optimizer state, and on both stages the gradient that is sent
    assert apart - together == pytest.approx(costs.tied[0][1] + 2 * size)
    assert sum(costs.of("m_fixed")) == pytest.approx(together)


def test_a_plan_over_its_limit_is_refused():
    tokens = torch.zeros(4, dtype=torch.long)
    costs = layer_memory(tied_model(), (tokens, tokens), loss_fn)
    sizes = {"n_stages": 2, "n_microbatches": 4, "split": "even"}
    request = PlanRequest(schedule="ZBH1", costs=costs, **sizes)
    need = zbpp.make_plan(request).peak
    replace(request, memory_limit=need)
    with pytest.raises(zbpp.RequestError, match="over the limit"):
        zbpp.make_plan(replace(request, memory_limit=0.97 * need))
    untied = replace(costs, tied=())
    zbpp.make_plan(replace(request, costs=untied, memory_limit=0.97 * need))


def test_ties_are_in_the_file(tmp_path):
    tokens = torch.zeros(4, dtype=torch.long)
    costs = layer_memory(tied_model((0, 3, 7)), (tokens, tokens), loss_fn)
    assert costs.tied[0][0] == (0, 3, 7)
    path = tmp_path / "layers.json"
    write_layers(costs, path)
    assert parse_layers(path.read_text()) == costs


@pytest.mark.slow
@pytest.mark.parametrize("write", ["schedule", "plan"])
def test_a_file_that_is_written_again_is_read_again(write, tmp_path):
    path, sizes = tmp_path / "plan.json", {"n_stages": 2, "n_microbatches": 8}
    layers, x = [nn.Linear(64, 64) for _ in range(4)], torch.zeros(8, 64)

    def peaks(mode):
        found = estimate(layers, (x, x), nn.functional.mse_loss, modes=[mode], **sizes)
        return [stage.peak for stage in found.modes[mode]]

    found = {}
    for mode in ("FThenB", "1F1B"):
        plan = zbpp.make_plan(PlanRequest(schedule=mode, **sizes))
        if write == "plan":
            plan.save(path)
        else:
            write_schedule(plan.schedule, path)
        found[mode] = peaks(str(path))
        assert found[mode] == peaks(mode)
    assert found["FThenB"] != found["1F1B"]
