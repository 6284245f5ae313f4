"""Commands that take a model: its memory, its weight gradients, a trace of its run."""

import importlib
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from zbpp.core import read_costs, read_layers

pytestmark = pytest.mark.needs("torch")

MODELS = """
import torch
from torch import nn
from torch.nn.functional import mse_loss

def batch():
    return torch.ones(8, 64), torch.ones(8, 64)

def block(i=0):
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh())

def triple():
    return [block() for _ in range(6)], batch(), mse_loss

def moved():
    layers = nn.Sequential(*triple()[0]).to("cpu", torch.float64).cpu()
    inputs, targets = (x.double() for x in batch())
    return layers.to(inputs), (inputs, targets), mse_loss

def of_transformers():
    from transformers import AutoConfig, AutoModelForCausalLM
    tokens = torch.zeros(1, 16, dtype=torch.long)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("llama"))
    return model, {"input_ids": tokens, "labels": tokens}

def pair():
    return [block(), block()], (batch()[0], None)

def builder():
    return ((lambda indices: [block(i) for i in indices]), 3), batch(), mse_loss

def one_module():
    return block(), batch(), mse_loss

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.idle = nn.Linear(8, 8)

    def forward(self, x):
        return self.frozen(self.up(self.embed(x))) @ self.embed.weight.t()

def tied_list():
    ends = nn.Embedding(512, 16), nn.Linear(16, 512, bias=False)
    ends[1].weight = ends[0].weight
    tokens = torch.zeros(2, dtype=torch.long)
    loss_fn = nn.functional.cross_entropy
    return [ends[0], nn.Linear(16, 16), ends[1]], (tokens, tokens), loss_fn

def tied():
    return Tied(), torch.zeros(3, 4, dtype=torch.long)
"""


@pytest.fixture(autouse=True)
def models(zbpp, monkeypatch):
    Path("my_models.py").write_text(MODELS)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    importlib.invalidate_caches()


@pytest.mark.slow
def test_estimate_has_bytes_by_mode_and_stage_and_marks_what_is_over_the_limit(zbpp):
    from pages import mistakes

    line = "estimate -p 2 -m 4 --model my_models:triple --optimizer sgd --modes"
    data = zbpp.json(f"{line} FThenB zb-h1")
    assert not mistakes("estimate", data)
    assert mistakes("estimate", data | {"unit": "GiB"})
    assert data["unit"] == "bytes" and list(data["modes"]) == ["FThenB", "ZBH1"]
    n = 3 * (64 * 64 + 64) * 4
    for mode, stages in data["modes"].items():
        for stage in stages:
            assert stage["parameters"] == stage["gradients"] == n
            assert stage["rollback"] == (n if mode == "ZBH1" else 0)
            assert stage["peak"] > 2 * n and stage["optimizer"] == 0
    small, large = sorted(stage["peak"] for stage in data["modes"]["FThenB"])
    assert small < large
    for limit, n_over in ((small - 1, 2), (small, 1)):
        out = zbpp(f"{line} FThenB --memory_limit {limit}")
        assert len(re.findall(r"^│.* over ", out, re.MULTILINE)) == n_over, out


@pytest.mark.slow
def test_estimate_names_the_modes_that_fit_and_its_files_feed_the_planner(zbpp):
    line = (
        "estimate -p 2 -m 4 --model my_models:triple --optimizer none "
        "--modes 1F1B FThenB --costs_out c.json --layers_out l.json --memory_limit"
    )
    out = zbpp(f"{line} 75KiB")
    assert "no mode fits 75.0 KiB a stage" in out and "1F1B none" in out
    memory = read_costs("c.json")
    assert isinstance(memory.m_b, tuple) and len(memory.m_b) == 2
    assert memory.memory_limit == 75 * 1024
    assert read_layers("l.json").n_layers == 6
    zbpp("show 1F1B -p 2 -m 4 --costs c.json", code=2)  # over it
    out = zbpp(f"{line} 1000KiB")
    assert "1F1B, FThenB fit 1000 KiB" in out and "1F1B none" not in out


@pytest.mark.slow
def test_costs_of_an_estimate_count_received_gradients_of_ties(zbpp):
    line = "estimate -p 2 -m 4 --model my_models:tied_list --optimizer sgd"
    zbpp(f"{line} --modes 1F1B --costs_out c.json")
    assert read_costs("c.json").peak_o == (512 * 16 * 4,) * 2


@pytest.mark.needs("transformers")
def test_estimate_takes_a_configuration_of_transformers(zbpp):
    """The weights have no values, by which a cut is checked otherwise.

    A function may return such a model, too.
    """
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=16,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    config.save_pretrained("llama")
    line = "estimate -p 2 -m 2 --modes 1F1B ZBV --microbatch_size 1"
    data = zbpp.json(f"{line} --model hf:llama/config.json --seq 16")
    n = transformers.LlamaForCausalLM(config).num_parameters()
    for stages in data["modes"].values():
        assert sum(stage["parameters"] for stage in stages) == 4 * n
    assert zbpp.json(f"{line} --model my_models:of_transformers") == data


def test_a_function_may_cast_and_move_a_model_that_is_estimated(zbpp):
    """It has no data then, which could be copied."""
    line = "estimate -p 2 -m 4 --optimizer none --modes 1F1B --model my_models"
    plain, moved = (
        [stage["parameters"] for stage in zbpp.json(f"{line}:{name}")["modes"]["1F1B"]]
        for name in ("triple", "moved")
    )
    assert moved == [2 * n_bytes for n_bytes in plain]


@pytest.mark.slow
def test_a_mesh_is_chosen_by_the_bytes_and_operations_of_a_model(zbpp):
    one, two = zbpp.json(
        "mesh --model my_models:triple --devices 2 -m 4 --device_flops 1e6 "
        "--replica_bandwidth 1e9 --mode ZBH1"
    )["meshes"]
    work = 3 * 6 * (2 * 8 * 64 * 64) / 1e6  # F, B and W of a micro-batch, in seconds
    assert one["step"] - one["exposed"] == pytest.approx(2 * work)
    assert two["step"] > 4 * work / 2
    n = 6 * (64 * 64 + 64)
    assert one["peak_memory"] >= 16 * n  # and what a rollback needs
    assert 8 * n < two["peak_memory"] < one["peak_memory"]


@pytest.mark.parametrize("name", ["triple", "pair", "builder", "one_module"])
def test_doctor_takes_a_model_with_its_batch_and_loss(zbpp, name):
    out = zbpp(f"doctor --model my_models:{name}")
    assert "weight" in out and "│ W" in out


def test_doctor_lists_the_weights_whose_gradients_run_in_w(zbpp):
    out = zbpp("doctor --model my_models:tied")
    cells = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    assert {row[1]: row[3] for row in cells if len(row) > 2} == {
        "embed.weight": "B: no product's weight",
        "up.weight": "W",
        "up.bias": "B: no product's weight",
        **dict.fromkeys(("frozen.weight", "frozen.bias"), "frozen"),
        **dict.fromkeys(("idle.weight", "idle.bias"), "unused"),
    }
    assert "42.1% of 152 parameters" in out


@pytest.mark.parametrize(
    ("kind", "n_devices", "lines"),
    [
        (
            "xpu",
            1,
            [
                "accelerator    xpu, its messages by xccl",
                "xpu 0          Max 1550, 64.0 GiB",
            ],
        ),
        ("xpu", 0, ["accelerator    no xpu device visible"]),
        ("mps", 1, ["accelerator    none: torch is built for CPUs"]),
    ],
)
def test_doctor_names_the_accelerator(zbpp, monkeypatch, kind, n_devices, lines):
    import torch

    about = SimpleNamespace(name="Max 1550", total_memory=2**36)
    for name, value in (
        ("accelerator.current_accelerator", torch.device(kind)),
        ("accelerator.is_available", n_devices > 0),
        ("accelerator.device_count", n_devices),
        (f"{kind}.get_device_properties", about),
    ):
        answer = partial(lambda value, *_: value, value)
        monkeypatch.setattr(f"torch.{name}", answer, raising=False)
    assert {*lines} <= {*zbpp("doctor").splitlines()}
