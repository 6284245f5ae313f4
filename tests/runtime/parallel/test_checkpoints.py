"""A checkpoint of a mesh goes on in any other, and in a plain model."""

import warnings
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from mesh_runs import Found, layers, loss_fn, train, train_all
from pool import Pool
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.tensor import Shard, distribute_tensor

import zbpp
from zbpp.checkpoint import newest, read_model, state

pytestmark = pytest.mark.dist


def together(found: list[Found]) -> dict[str, Tensor]:
    """All parameters of a run."""
    return {name: p for one in found for name, p in one.parameters.items()}


def run(pool: Pool, mode: str, how: str, n: int, **more: Any) -> dict[str, Tensor]:
    if n == 1:
        return together([train(mode, how, stages=1, data_parallel=1, **more)])
    return together([one for (one,) in pool.run(train_all, n, [(mode, how, more)])])


@pytest.mark.slow
def test_a_run_goes_on_in_another_mesh(pool: Pool, tmp_path: Path) -> None:
    whole = run(pool, "ZBV", "optimizer", 4, steps=4)
    folder = {"folder": str(tmp_path)}
    run(pool, "ZBV", "optimizer", 4, steps=2, **folder)
    rest = {"first": 2, "steps": 4, **folder}
    again = run(pool, "ZBH1", "optimizer", 4, **rest)
    for name, value in whole.items():  # the same replicas: the same bits
        assert torch.equal(again[name], value), name
    other = {
        "four stages": run(pool, "ZBH1", "bare", 4, stages=4, data_parallel=1, **rest),
        "four replicas": run(
            pool, "1F1B", "parameters", 4, stages=1, data_parallel=4, **rest
        ),
        "one process": run(pool, "1F1B", "bare", 1, **rest),
    }
    for words, its in other.items():
        assert its.keys() == whole.keys(), words
        for name, value in whole.items():
            torch.testing.assert_close(its[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_plain_model_loads_it(pool: Pool, tmp_path: Path) -> None:
    saved = run(pool, "ZBH1", "optimizer", 4, steps=2, folder=str(tmp_path))
    found = read_model(tmp_path)
    model = nn.Sequential(*layers())
    model.load_state_dict({n.removeprefix("layers."): p for n, p in found.items()})
    for name, p in model.named_parameters():
        assert torch.equal(p, saved[f"layers.{name}"])
    assert loss_fn(model(torch.ones(1, 8)), torch.ones(1, 8)).isfinite()


def gather_and_count(folder: str) -> tuple[int, int]:
    """How many tensors a save gathers, and how many of them are there at a time."""
    alive: set[int] = set()
    seen = [0]
    whole = state.whole

    def watched(tensor: Tensor) -> Tensor:
        gathered = whole(tensor)
        if gathered is not tensor:
            number = len(seen)
            alive.add(number)
            weakref.finalize(gathered, alive.discard, number)
            seen.append(len(alive))
        return gathered

    with mock.patch.object(state, "whole", watched):
        train("1F1B", "parameters", stages=1, steps=1, folder=folder)
    return len(seen) - 1, max(seen)


def test_shards_are_gathered_one_at_a_time(pool: Pool, tmp_path: Path) -> None:
    n_sharded = 3 * sum(len(list(layer.parameters())) for layer in layers())
    for n_gathered, most in pool.run(gather_and_count, 2, str(tmp_path)):
        assert n_gathered == n_sharded  # each with two moments
        assert most == 1


def read_shards(folder: str) -> dict[str, Tensor]:
    """The whole of what the reader of torch has put into shards of weights."""
    mesh = zbpp.mesh(stages=1, data_parallel=2)["dp"]
    shards = {
        f"model/layers.1.{name}": distribute_tensor(
            torch.zeros_like(p, requires_grad=False), mesh, [Shard(0)]
        )
        for name, p in layers()[1].named_parameters()
    }
    reader = HuggingFaceStorageReader(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.load(shards, storage_reader=reader, no_dist=True)
    return {key: shard.full_tensor() for key, shard in shards.items()}


def test_the_storage_reader_of_torch_fills_shards(pool: Pool, tmp_path: Path) -> None:
    train("ZBH1", "bare", stages=1, data_parallel=1, steps=1, folder=str(tmp_path))
    saved = read_model(tmp_path)
    for found in pool.run(read_shards, 2, str(newest(tmp_path))):
        for key, value in found.items():
            assert torch.equal(value, saved[key.removeprefix("model/")])
