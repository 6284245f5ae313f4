"""Checkpoints of trainable parameters alone, of peft's adapters too."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

import zbpp
from zbpp import RequestError
from zbpp.checkpoint import load, read_model

D = 8


class Lora(nn.Module):
    """A frozen linear layer beside a trained product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def model(seed: int) -> nn.Sequential:
    """Equal in what is frozen, whatever the seed."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(Lora() for _ in range(4)))
    torch.manual_seed(seed)
    for p in layers.parameters():
        if p.requires_grad:
            nn.init.normal_(p)
    return layers


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def pipeline_of(layers: Any, mode: str, n_stages: int, **more: Any) -> zbpp.Pipeline:
    given = {"loss_fn": nn.functional.mse_loss, "optimizer": adamw} | more
    return flat_pipeline(
        layers, schedule=mode, n_stages=n_stages, n_microbatches=2, **given
    )


def steps(pipeline: zbpp.Pipeline, n: int) -> list[float]:
    x = torch.linspace(-1, 1, 4 * D).view(4, D)
    return [pipeline.step(x, x).loss for _ in range(n)]


def test_trainable_parameters_alone_go_on_from_the_same_base(tmp_path: Path) -> None:
    whole = steps(pipeline_of(model(1), "ZBH1", 2), 4)
    with pipeline_of(model(1), "ZBV", 2) as pipeline:
        steps(pipeline, 2)
        pipeline.save(tmp_path, trainable_only=True, wait=True)
    saved = read_model(tmp_path)
    assert saved.keys() == {
        name for name, p in model(1).named_parameters() if p.requires_grad
    }
    with pipeline_of(model(2), "1F1B", 4) as fresh:
        fresh.load(tmp_path)
        assert steps(fresh, 2) == whole[2:]
    with pipeline_of(model(2), "1F1B", 4) as other:
        assert steps(other, 4)[2:] != whole[2:]


def test_a_parameter_that_is_trained_now_and_was_frozen_is_missing(
    tmp_path: Path,
) -> None:
    with pipeline_of(model(1), "ZBH1", 2) as pipeline:
        steps(pipeline, 1)
        pipeline.save(tmp_path, trainable_only=True, wait=True)
    layers = model(1)
    layers[2].base.weight.requires_grad_(True)
    with (
        pipeline_of(layers, "ZBH1", 2) as fresh,
        pytest.raises(RequestError, match=r"2\.base\.weight is missing"),
    ):
        fresh.load(tmp_path)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
def test_peft_reads_an_adapter_that_a_plain_model_loads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    base = transformers.LlamaForCausalLM(config)
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
    )
    trained = peft.get_peft_model(copy.deepcopy(base), lora)
    ids = torch.randint(0, 32, (4, 6))
    with pipeline_of(trained.get_base_model(), "ZBH1", 2, loss_fn=None) as pipeline:
        for _ in range(3):
            pipeline.step({"input_ids": ids, "labels": ids})
        pipeline.save(tmp_path, trainable_only=True, wait=True)
    plain = peft.get_peft_model(copy.deepcopy(base), lora)
    load(tmp_path, plain.get_base_model())
    plain.save_pretrained(tmp_path / "out")
    read = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    ours, theirs = trained.eval()(ids).logits, read.eval()(ids).logits
    assert torch.equal(ours, theirs)
    with read.disable_adapter():
        assert not torch.equal(read(ids).logits, theirs)
