"""Models of transformers and adapters of peft: their own functions write the result."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import zbpp
from zbpp.checkpoint import load, read_model

pytestmark = [
    pytest.mark.needs("transformers"),
    pytest.mark.xdist_group("hf"),
    pytest.mark.slow,
]
SIZES = {"vocab_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


def gpt2() -> Any:
    """Its ends are tied."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, n_embd=32, n_positions=16)
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **SIZES, hidden_size=32, intermediate_size=48, num_key_value_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def train(model: Any, mode: str, n_stages: int, folder: Path, **more: Any) -> None:
    """Go on from what is in the folder, and save there."""
    ids = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(0))
    with zbpp.Pipeline(
        model, mode, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        n_stages=n_stages, n_microbatches=2, clip_grad_norm=1.0,
    ) as pipeline:  # fmt: skip
        pipeline.load(folder, missing_ok=True)
        for _ in range(2):
            pipeline.step({"input_ids": ids, "labels": ids})
        pipeline.save(folder, wait=True, **more)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_model_is_read_by_transformers(make: Any, tmp_path: Path) -> None:
    train(make(), "1F1B", 2, tmp_path)
    train(make(), "ZBV", 2, tmp_path)
    plain = make()
    before = {name: p.clone() for name, p in plain.state_dict().items()}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=5.0)
    assert load(tmp_path, plain, optimizers=[optimizer])["step"] == 4
    assert optimizer.param_groups[0]["lr"] == 1e-2
    state, saved = plain.state_dict(), read_model(tmp_path)
    assert state.keys() == saved.keys()
    for name, value in state.items():
        assert torch.equal(value, saved[name])
        assert not torch.equal(value, before[name])
    plain.save_pretrained(tmp_path / "out")
    again = type(plain).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.needs("peft")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft
def test_peft_reads_an_adapter(tmp_path: Path) -> None:
    import peft

    base = llama()
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]
    )
    trained = peft.get_peft_model(copy.deepcopy(base), lora)
    train(trained.get_base_model(), "ZBH1", 2, tmp_path, trainable_only=True)
    plain = peft.get_peft_model(copy.deepcopy(base), lora)
    load(tmp_path, plain.get_base_model())
    plain.save_pretrained(tmp_path / "out")
    read = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    ids = torch.arange(6)[None]
    ours, theirs = trained.eval()(ids).logits, read.eval()(ids).logits
    assert torch.equal(ours, theirs)
    with read.disable_adapter():
        assert not torch.equal(read(ids).logits, theirs)
