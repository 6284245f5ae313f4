"""`zbpp train --model hf:PATH`: models of transformers, on bytes, saved and resumed."""

import json
from pathlib import Path
from typing import Any

import pytest
from training_here import run_train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.needs("transformers"),
    pytest.mark.usefixtures("transformers"),
]

SIZES = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
LLAMA = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 16},
}
TEXT = "to be or not to be, that is the question; " * 30
TINY = (
    "--stages=1 --microbatches=2 --microbatch_size=1 --seq=16 --lr=1e-2 "
    "--clip_grad_norm=0.5 --data=text.txt --metrics=metrics.jsonl"
)


@pytest.fixture
def transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In a folder with a text, and a configuration with tied weights and dropout."""
    import transformers

    transformers.logging.set_verbosity_error()
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    transformers.GPT2Config(**SIZES, **GPT2).save_pretrained("gpt2")
    return transformers


def outcome(*words: str) -> list[Any]:
    """Loss and norm of each step, the validation's loss and the hash."""
    assert run_train(*TINY.split(), *words) == 0
    lines = Path("metrics.jsonl").read_text().splitlines()
    *steps, final = map(json.loads, lines)
    numbers = [(one["loss"], one["grad_norm"]) for one in steps]
    return [*numbers, final["val_loss"], final["params_sha256"]]


def test_a_configuration_is_trained_and_resumed_with_the_same_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = "--model=hf:gpt2/config.json"
    whole = outcome(model, "--steps=4")
    assert " 34,176 parameters in 4 layers" in capsys.readouterr().out  # tied once
    assert outcome(model, "--steps=1", "--seed=1")[0] != whole[0]
    zbv = ["--pipeline_schedule_mode=ZBV", "--stages=2", "--steps=2"]
    outcome(model, *zbv, "--save_dir=run")
    rest = ["--pipeline_schedule_mode=1F1B", "--stages=3", "--steps=4"]
    Path("metrics.jsonl").unlink()
    assert outcome(model, *rest, "--save_dir=run") == whole[2:]
    capsys.readouterr()
    assert run_train(*TINY.split(), "--save_dir=run") == 2
    assert "of another model: " in capsys.readouterr().err


def test_training_continues_from_the_weights_of_a_checkpoint(transformers: Any) -> None:
    import torch

    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA))
    model.bfloat16().save_pretrained("llama", max_shard_size="40KB")
    assert Path("llama/model.safetensors.index.json").exists()
    of_line = 17 * "a"  # every window is the same
    Path("text.txt").write_text(of_line * 30)
    (loss, _), *_ = outcome("--model=hf:llama", "--stages=2", "--steps=1")
    ids = torch.full((1, 16), ord("a"))
    expected = model.float()(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(expected, rel=1e-6)
    drawn = outcome("--model=hf:llama/config.json", "--stages=2", "--steps=1")
    assert drawn[0][0] != pytest.approx(loss)


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        ("config.json", {"vocab_size": 200}, "200 tokens, and"),
        (".", {}, "no safetensors files;"),
        ("config.json", {"n_positions": 8}, "max_position_embeddings is 8"),
        ("config.json", {"model_type": "absent"}, "absent"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(
    name: str, changed: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "gpt2", **SIZES, **GPT2, **changed}
    Path("config.json").write_text(json.dumps(config))
    assert run_train(*TINY.split(), f"--model=hf:{name}") == 2
    assert words in capsys.readouterr().err
