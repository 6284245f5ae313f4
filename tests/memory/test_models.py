"""Models of transformers: estimated as layers, with dict batches and tied weights."""

import copy
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from allocator import worst
from torch import nn

from zbpp.cli import main
from zbpp.memory import estimate
from zbpp.memory.fake import building, fake_mode
from zbpp.models import cut, layered_of

transformers = pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 6,
    "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 512,
    "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip


def made(config: dict[str, Any]) -> nn.Module:
    rest = {key: value for key, value in config.items() if key != "model_type"}
    known = transformers.AutoConfig.for_model(config["model_type"], **rest)
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(known)
    return model


def batch() -> dict[str, Any]:
    tokens = torch.arange(128).view(4, 32)
    return {"input_ids": tokens, "labels": tokens}


def stages(model: Any, mode: str = "ZBV") -> Any:
    sizes = {"n_stages": 2, "n_microbatches": 4, "modes": [mode]}
    return estimate(model, batch(), **sizes).modes[mode]


def parts_of(config: dict[str, Any], **more: Any) -> Any:
    layered = layered_of(made(config))
    layers = list(layered.build(range(layered.n_layers)))
    return layers, layered.cut_batch({**batch(), **more}), layered.loss_fn


@pytest.mark.slow
@pytest.mark.parametrize("has_mask", [False, True])
def test_masks_are_those_of_batches_without_padding(
    has_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 256}
    tokens = torch.arange(512).view(2, 256)
    mask = {"attention_mask": torch.ones(2, 256, dtype=torch.long)} if has_mask else {}
    parts = parts_of(config, input_ids=tokens, labels=tokens, **mask)
    assert worst(parts, range(2, 4))[0] < 0.005
    # the negative control: transformers takes fakes for a compiler's
    monkeypatch.setattr("zbpp.memory.model.reading_fakes", nullcontext)
    assert worst(parts, range(2, 4))[0] > 0.02


@pytest.mark.slow
def test_a_tied_weight_counts_once_for_each_stage_that_holds_it() -> None:
    model = made(GPT2)
    tied = 512 * 64 * 4
    whole = sum(p.nbytes for p in model.parameters())
    both_ends = stages(model)  # of a V: on the first stage
    assert sum(stage.parameters for stage in both_ends) == whole
    apart = stages(model, "ZBH1")
    assert sum(stage.parameters for stage in apart) == whole + tied


def test_copies_of_fake_modules_share_their_mode(monkeypatch) -> None:
    """Copied together with its tensors, a mode has corrupted the process's memory."""
    copies: list[nn.Module] = []

    def copied(module: nn.Module, kept: dict[int, object]) -> nn.Module:
        copies.append(copy.deepcopy(module, kept))
        return copies[-1]

    cutting = sys.modules["zbpp.models.cut"]
    monkeypatch.setattr(cutting, "copy", SimpleNamespace(deepcopy=copied))
    mode = fake_mode()
    with building(mode):
        layered = layered_of(made({**LLAMA, "num_hidden_layers": 2}))
        layered.build(range(layered.n_layers))
    held = [buffer for module in copies for buffer in module.buffers()]
    assert held and all(buffer.fake_mode is mode for buffer in held)


@pytest.mark.nightly
@pytest.mark.slow
def test_weights_that_are_real_fake_or_made_later_are_estimated_alike() -> None:
    real = stages(made(LLAMA))
    with building(fake_mode()):
        fake = layered_of(made(LLAMA))
        layers = list(fake.build(range(fake.n_layers)))
    with torch.device("meta"):
        later = cut(made(LLAMA), weights=0)
    tokens = fake.cut_batch(batch())
    sizes = {"n_stages": 2, "n_microbatches": 4, "modes": ["ZBV"]}
    assert estimate(layers, tokens, fake.loss_fn, **sizes).modes["ZBV"] == real
    assert stages(later) == real


def written(folder: Path, config: Any) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return f"hf:{file}"


@pytest.mark.slow
def test_a_configuration_file_is_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = written(tmp_path, GPT2)
    sizes = ["--stages", "2", "--microbatches", "4", "--modes", "ZBV"]
    more = ["--seq", "32", "--microbatch_size", "4", "--json"]
    assert main(["estimate", "--model", name, *sizes, *more]) == 0
    found = json.loads(capsys.readouterr().out)["modes"]["ZBV"]
    expected = stages(made(GPT2))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["peak"] == pytest.approx(theirs.peak, rel=0.01)
    assert main(["doctor", "--model", f"hf:{tmp_path}"]) == 0  # the folder
    assert "lm_head.weight" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"hidden_size": 4}, "names no model_type"),
        ({"model_type": "absent"}, "absent"),
        ({"model_type": "vit"}, "vit is no causal language model"),
        ({**GPT2, "n_positions": 16}, "max_position_embeddings is 16"),
    ],
)
def test_what_is_no_language_model_is_refused(
    config: Any, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--stages", "2", "--microbatches", "4"]
    assert main(["estimate", "--model", written(tmp_path, config), *sizes]) == 2
    assert text in capsys.readouterr().err
