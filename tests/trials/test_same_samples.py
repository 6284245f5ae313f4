"""First and last stage that read other samples are found in the step that begins so."""

import re
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import zbpp

pytestmark = pytest.mark.dist
WIDTH = 8
Case = dict[str, Any]


def make(case: Case) -> zbpp.Pipeline:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    settings = {"post_validation": True} if case.get("speculates") else {}
    return flat_pipeline(
        layers,
        schedule=case.get("schedule", "ZBH1"),
        loss_fn=mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        n_microbatches=4,
        **settings,
    )


def batch(step: int, is_off: bool, case: Case) -> tuple[list[Tensor | None], Any]:
    """Inputs and targets, and the numbers of the samples."""
    number = step + 100 * is_off
    both: list[Tensor | None] = []
    for place, name in enumerate(("inputs", "targets")):
        seed = 2 * (number if name in case["differ"] else step) + place
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(WIDTH, 16, generator=generator).t()
        both.append(x if case.get("strided") else x.contiguous())
    key = torch.arange(16) + 16 * (number if "key" in case["differ"] else step)
    if case.get("own_part"):
        both[1 - torch.distributed.get_rank()] = None
    return both, key.tolist() if case.get("listed") else key


def outcome(case: Case) -> tuple[int, str, bool]:
    """Number of the call that raised, its words, and if the state is that before."""
    pipeline, since = make(case), case.get("since", 99)
    rank = torch.distributed.get_rank()
    held = dict(pipeline.named_parameters())
    before: dict[str, Any] = {}
    for step in range(case.get("n", since + 3)):
        if step == since:
            pipeline.synchronize()
            before = {name: p.detach().clone() for name, p in held.items()}
        both, key = batch(step, step >= since and rank == 1, case)
        options = {"key": key} if case.get("key") else {}
        try:
            if case.get("parts"):
                first, first_key = batch(50, False, case)
                more = options and {"key": first_key}
                pipeline.forward_backward(*first, n_calls=2, **more)
                pipeline.forward_backward(*both, n_calls=2, **options)
                pipeline.optim_step()
            else:
                pipeline.step(*both, **options)
        except zbpp.RequestError as error:
            is_as_before = all(torch.equal(held[k], p) for k, p in before.items())
            return step, str(error), is_as_before
    pipeline.close()
    return -1, "", True


def outcomes(cases: list[Case]) -> list[tuple[int, str, bool]]:
    return [outcome(case) for case in cases]


APART = {"differ": ("inputs", "targets", "key")}
KEYS = {"differ": ("inputs", "targets", "key"), "own_part": True, "key": True}
REFUSED: list[Case] = [
    *(
        {**APART, "since": k, "schedule": s}
        for k in (0, 3, 5)
        for s in ("1F1B", "ZBH1")
    ),
    {**APART, "since": 4, "strided": True},
    {**APART, "since": 3, "speculates": True},
    {**APART, "since": 1, "parts": True},
    {**KEYS, "since": 3},
    {**KEYS, "since": 3, "listed": True, "speculates": True},
    {**KEYS, "since": 1, "parts": True},
    {"differ": ("key",), "since": 2, "key": True},  # instead of both
]
FINE: list[Case] = [
    {"differ": (), "since": 0},
    {"differ": ("inputs",), "since": 0},  # augmented at random where they are read
    {"differ": ("targets",), "since": 0},
    {"differ": ("inputs", "targets"), "since": 0, "key": True},  # of the same samples
    {"differ": (), "since": 0, "own_part": True, "key": True},
    {**APART, "since": 0, "own_part": True},  # nothing to compare
    {**APART, "since": 0, "schedule": "ZBV"},  # one process reads both
]


def test_other_samples_are_refused_in_their_step(pool: Pool) -> None:
    every = pool.run(outcomes, 2, REFUSED + FINE)
    for case, *found in zip(REFUSED + FINE, *every, strict=True):
        assert found[0] == found[1], case  # the same words on both ranks
        call, words, is_as_before = found[0]
        if case in FINE:
            assert words == "", case
            continue
        since = case["since"]
        assert call == since + bool(case.get("speculates")), case
        assert is_as_before, case
        pattern = rf"first and the last stage read other samples in step {since},.*"
        assert re.search(pattern + r"loader.*sampler|Sampler", words), words


def shuffle_apart(epoch: int) -> str:
    """The ranks' samplers begin to differ in an epoch."""
    pipeline = make({"schedule": "1F1B"})
    data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
    own = torch.Generator()
    loader = DataLoader(TensorDataset(data, data), 16, shuffle=True, generator=own)
    step = 0
    for number in range(epoch + 2):
        rank = torch.distributed.get_rank()
        own.manual_seed(number + 10 * (number >= epoch and rank))
        for pair in loader:
            try:
                pipeline.step(*pair)
            except zbpp.RequestError as error:
                return f"call {step}: {error}"
            step += 1
    return "nothing"


@pytest.mark.parametrize("epoch", [1, 3])
def test_other_samplers_are_refused_in_their_first_step(epoch: int, pool: Pool) -> None:
    first, second = pool.run(shuffle_apart, 2, epoch)
    assert first == second
    step = 4 * epoch
    assert first.startswith(f"call {step}: ") and f"in step {step}, " in first


def wrong_key(key: Any) -> str:
    pipeline = make({})
    x = torch.zeros(16, WIDTH)
    try:
        pipeline.step(x, x, key=key)
    except zbpp.RequestError as error:
        return str(error)
    return ""


def test_a_key_holds_whole_numbers(pool: Pool) -> None:
    for words in pool.run(wrong_key, 2, ["a", "b"]):
        assert "key is a list; give the numbers of the samples" in words
