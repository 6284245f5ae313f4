"""Models of transformers, tied ones too: saved, resumed, and read by transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool

from zbpp.checkpoint import load, newest
from zbpp.checkpoint.manifest import read_manifest

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64}


def model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            **SIZES, n_embd=32, n_layer=4, n_head=4, n_positions=16
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.LlamaConfig(
        **SIZES,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def run(
    kind: str, mode: str, n_stages: int | None, folder: str, *, load: bool
) -> list[float]:
    """Two steps and a save, or a load and two steps."""
    pipeline = flat_pipeline(
        model(kind),
        optimizer=adamw,
        schedule=mode,
        n_stages=n_stages,
        seed=1,
        n_microbatches=2,
        clip_grad_norm=1.0,
    )
    if load:
        pipeline.load(folder)
    losses = []
    for step in range(pipeline.n_steps, pipeline.n_steps + 2):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 64, (4, 8), generator=generator)
        losses.append(pipeline.step({"input_ids": ids, "labels": ids}).loss)
    if not load:
        pipeline.save(folder, wait=True)
    pipeline.close()
    return losses


@pytest.mark.parametrize(
    "kind",
    [
        "gpt2",  # whose ends are tied
        pytest.param("llama", marks=pytest.mark.slow),
    ],
)
def test_a_model_goes_on_and_is_read_by_transformers(kind, tmp_path) -> None:
    run(kind, "1F1B", 2, str(tmp_path), load=False)
    rest = run(kind, "ZBV", 2, str(tmp_path), load=True)
    assert rest == run(kind, "ZBH1", 1, str(tmp_path), load=True)
    check_plain(kind, tmp_path)


def check_plain(kind: str, folder: Path) -> None:
    plain = model(kind)
    before = {n: p.clone() for n, p in plain.state_dict().items()}
    optimizer = torch.optim.AdamW(plain.parameters(), lr=5.0)
    assert load(folder, plain, optimizers=[optimizer])["step"] == 2
    assert optimizer.param_groups[0]["lr"] == 1e-2
    state = plain.state_dict()
    assert not any(torch.equal(before[name], state[name]) for name in before)
    manifest = read_manifest(newest(folder))
    saved = {name for name in manifest.tensors if name.startswith("model/")}
    tied = {"lm_head.weight"} if kind != "llama" else set()
    assert saved == {f"model/{name}" for name in state.keys() - tied}
    assert set(manifest.aliases) == tied
    plain.save_pretrained(folder / "out")
    again = type(plain).from_pretrained(folder / "out").state_dict()
    assert all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.dist
@pytest.mark.slow
def test_tied_weights_of_two_processes_are_saved_once(pool: Pool, tmp_path) -> None:
    first = pool.run(run_apart, 2, "1F1B", str(tmp_path), False)
    check_plain("gpt2", tmp_path)
    rest = pool.run(run_apart, 2, "1F1B", str(tmp_path), True)
    assert rest[0] == rest[1] == run("gpt2", "ZBV", 2, str(tmp_path), load=True)
    assert first[0] == first[1]


def run_apart(mode: str, folder: str, loads: bool) -> list[float]:
    return run("gpt2", mode, None, folder, load=loads)
