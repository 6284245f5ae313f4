"""`zbpp train --model hf:PATH`: models of transformers, on bytes, saved and resumed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_here import train_here

from zbpp.cli import main
from zbpp.core import RequestError, read_costs
from zbpp.training.data import load_corpus
from zbpp.training.options import TrainOptions

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
LLAMA = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 16},
}
TINY = TrainOptions(
    stages=1, microbatches=2, microbatch_size=1, seq=16, size="tiny", steps=4, lr=1e-2,
    clip_grad_norm=0.5, data=Path(__file__),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    """A configuration with tied weights and dropout."""
    transformers.GPT2Config(**SIZES, **GPT2).save_pretrained(tmp_path / "gpt2")
    return f"hf:{tmp_path / 'gpt2' / 'config.json'}"


def outcome(options: TrainOptions, metrics: Path) -> list[Any]:
    train_here(replace(options, metrics=metrics))
    *steps, final = map(json.loads, metrics.read_text().splitlines())
    numbers = [(one["loss"], one["grad_norm"]) for one in steps]
    return [*numbers, final["val_loss"], final["params_sha256"]]


def test_a_configuration_is_trained_and_resumed_with_the_same_bits(
    gpt2, tmp_path, capsys
) -> None:
    options = replace(TINY, model=gpt2)
    whole = outcome(options, tmp_path / "whole.jsonl")
    assert " 34,176 parameters in 4 layers" in capsys.readouterr().out  # tied once
    other = outcome(replace(options, seed=1, steps=1), tmp_path / "other.jsonl")
    assert other[0] != whole[0]
    parts = replace(options, pipeline_schedule_mode="ZBV", save_dir=tmp_path / "run")
    train_here(replace(parts, stages=2, steps=2))
    rest = outcome(
        replace(parts, pipeline_schedule_mode="1F1B", stages=3), tmp_path / "p"
    )
    assert rest == whole[2:]
    config = json.loads(Path(gpt2.removeprefix("hf:")).read_text())
    (tmp_path / "b.json").write_text(json.dumps({**config, "embd_pdrop": 0.3}))
    with pytest.raises(RequestError, match="of another training: config"):
        train_here(replace(parts, model=f"hf:{tmp_path / 'b.json'}"))
    with pytest.raises(RequestError, match=r"of another model: .* is missing"):
        train_here(replace(parts, model=None))


def test_a_checkpoint_is_trained_on_from_its_weights(tmp_path) -> None:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA))
    model.bfloat16().save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    options = replace(TINY, model=f"hf:{tmp_path}", stages=2, steps=1)
    (loss, _), *_ = outcome(options, tmp_path / "metrics.jsonl")
    tokens, _ = load_corpus(TINY.data, seq=16).training_batch(
        seed=0, step=0, windows=2, seq=16
    )
    ids = torch.from_numpy(tokens)
    expected = model.float()(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(expected, rel=1e-6)
    drawn = replace(options, model=f"hf:{tmp_path}/config.json")
    assert outcome(drawn, tmp_path / "metrics.jsonl")[0][0] != pytest.approx(loss)


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("hf:{}/config.json", {"vocab_size": 200}, "200 tokens, and .* it needs 256"),
        (
            "hf:{}",
            {},
            "no safetensors files; .* random weights give",
        ),
        ("hf:{}/config.json", {"n_positions": 8}, "max_position_embeddings is 8"),
        ("hf:nowhere", {}, "nowhere: cannot be read"),
    ],
)
def test_what_cannot_be_trained_is_refused(name, changed, words, tmp_path) -> None:
    config = {"model_type": "gpt2", **SIZES, **GPT2, **changed}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=words):
        train_here(replace(TINY, model=name.format(tmp_path)))


@pytest.mark.slow
def test_it_is_profiled(gpt2, tmp_path) -> None:
    out = tmp_path / "costs.json"
    flags = "--stages 1 --microbatches 2 --seq 16 --rounds 1"
    layers = ["--layers_out", str(tmp_path / "layers.json")]
    command = ["profile", "--model", gpt2, *flags.split(), "--dtype", "bf16"]
    assert main([*command, "--out", str(out), *layers]) == 0
    assert len(read_costs(out).f) == 1
    assert json.loads((tmp_path / "layers.json").read_text())["n_layers"] == 4
