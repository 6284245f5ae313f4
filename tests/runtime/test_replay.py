"""A replay finds generators, buffers and batches as they were."""

import random
import sys
from typing import Any

import pytest
import torch
from changing import (
    Change,
    Layer,
    in_place,
    pythons_numbers,
    replaced,
    running_mean,
    unmarked_mean,
)
from flat import flat_pipeline
from torch import Tensor, nn

from zbpp.runtime import replay
from zbpp.runtime.state_recorder import BufferRecorder

N_STEPS, M = 5, 4


def numpys_numbers(layer: Any, x: Tensor) -> Tensor:
    return x * float(sys.modules["numpy"].random.rand())


def mean_through_a_view(layer: Any, x: Tensor) -> Tensor:
    if not hasattr(layer, "row"):
        layer.row = layer.table[0, :8]
    with torch.no_grad():
        layer.row.lerp_(x.mean(0), 0.5)
    return x + layer.table[0, :8]


def made_when_needed(layer: Any, x: Tensor) -> Tensor:
    if "cache" not in layer._buffers:
        layer.register_buffer("cache", x.detach().mean(0), persistent=False)
    return x + layer.cache


CHANGES = (pythons_numbers, numpys_numbers, in_place, running_mean,
           mean_through_a_view, unmarked_mean, replaced, made_when_needed)  # fmt: skip


def batch(step: int) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(step)
    draws = [torch.randn(3, 8, generator=generator) for _ in range(2 * M)]
    return draws[:M], draws[M:]


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets) ** 2).mean()


def changing_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs - targets.mul_(0.5)) ** 2).mean()


def run(change: Change | None, *, post_validation: bool, **more: Any) -> Any:
    """Losses, parameters and buffers, and how many steps were rolled back."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(change), Layer(None), Layer(None), Layer(None))
    settings = {"loss_fn": loss_fn, "schedule": "ZBH1", "clip_grad_norm": 0.01}
    pipeline = flat_pipeline(
        model,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        n_stages=2,
        n_microbatches=M,
        post_validation=post_validation,
        **(settings | more),
    )
    random.seed(1)
    torch.manual_seed(1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(1)
    results = []
    for step in range(N_STEPS):
        model[0].step = step
        results.append(pipeline.step(*batch(step)))
    pipeline.close()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [r.loss for r in results], state, sum(r.rollbacks for r in results)


def compare(change: Change | None, **more: Any) -> None:
    losses, state, rollbacks = run(change, post_validation=True, **more)
    expected, held, none = run(change, post_validation=False, **more)
    assert (rollbacks, none) == (N_STEPS, 0)
    assert losses == expected
    for name, value in held.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("seed", [None, 7])
def test_a_replay_leaves_the_bits_of_a_barrier(
    change: Change, seed: int | None
) -> None:
    if change is numpys_numbers:
        pytest.importorskip("numpy").random.seed(0)
    compare(change, seed=seed)


@pytest.mark.parametrize("mode", ["ZBH1", "ZBV", "ZBH2"])
def test_a_large_batch_that_is_changed_in_place(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_SMALL_BYTES", 0)
    compare(in_place, schedule=mode)


@pytest.mark.parametrize("small", [0, 2**14])
def test_a_loss_that_changes_its_targets(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_SMALL_BYTES", small)
    compare(None, loss_fn=changing_loss)


def late(change: Change) -> Change:
    """Begins in the third step."""

    def changed(layer: Any, x: Tensor) -> Tensor:
        return change(layer, x) if layer.step == 2 else x

    return changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (running_mean, "the buffer table of a Layer was constant so far"),
        (in_place, "has changed its batch in place, which no forward did before"),
    ],
)
def test_a_large_constant_that_changes_late_ends_the_run_in_words(
    change: Change, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_SMALL_BYTES", 0)
    with pytest.raises(RuntimeError, match=reason):
        run(late(change), post_validation=True)


def test_constants_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """But in the first step, which sees what changes."""
    copied: list[int] = []
    snapshot = BufferRecorder.snapshot

    def counted(self: BufferRecorder) -> Any:
        taken = snapshot(self)
        copied.append(sum(copy.nbytes for copy in taken.copies.values()))
        return taken

    monkeypatch.setattr(BufferRecorder, "snapshot", counted)
    run(running_mean, post_validation=True)
    table = 64 * 128 * 4
    first, rest = copied[:2], copied[2:]
    assert first == [2 * table, 2 * table]
    assert sorted(rest) == [0] * (N_STEPS - 1) + [table] * (N_STEPS - 1)
