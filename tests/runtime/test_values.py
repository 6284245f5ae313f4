"""Dicts, masks and changing shapes between chunks: the bits of a plain loop."""

import masked_model
import pytest
import torch
from flat import flat_pipeline
from masked_model import M, batch, build, cut, loss_fn, make, train
from pool import Pool
from small_model import adamw, assert_same
from torch import Tensor, nn

from zbpp.models import Layered
from zbpp.pipeline import Pipeline


def train_plainly(steps: int = 10) -> tuple[list[float], dict[str, Tensor]]:
    """One process, micro-batch by micro-batch, all clipped as a whole."""
    model = nn.Sequential(*build(range(masked_model.N_LAYERS)))
    optimizer = adamw(list(model.parameters()))
    losses = []
    for step in range(steps):
        inputs, labels = cut(batch(step))
        each = []
        for i in range(M):
            part = {name: x.tensor_split(M)[i] for name, x in inputs.items()}
            each.append(loss_fn(model(part), labels.tensor_split(M)[i]))
            (each[-1] / M).backward()
        losses.append(float(torch.stack(each).detach().double().mean()))
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"layers.{n}": p.detach() for n, p in model.named_parameters()}


def clip(model: nn.Sequential) -> None:
    """As the pipeline: squares in float64, layer by layer."""
    layers = [
        torch.stack([p.grad.double().norm().square() for p in layer.parameters()])
        for layer in model
    ]
    norm = float(torch.stack([squares.sum() for squares in layers]).sum().sqrt())
    if norm > 0.5:
        for p in model.parameters():
            p.grad.mul_(0.5 / norm)


@pytest.fixture(scope="module")
def alone() -> masked_model.Found:
    return train("1F1B", 1)


def test_one_stage_is_the_plain_loop(alone: masked_model.Found) -> None:
    losses, parameters = train_plainly()
    assert [loss for loss, _ in alone[0]] == pytest.approx(losses, rel=1e-6)
    for name, value in parameters.items():
        torch.testing.assert_close(alone[1][name], value, rtol=1e-4, atol=1e-5)
    first, parameters = train_plainly(1)
    assert alone[0][0][0] == first[0]  # to the last bit, before anything is clipped


@pytest.mark.parametrize(
    ("mode", "n_stages"),
    [("ZBV", 1), ("1F1B", 2), ("ZBV", 4)],
)
def test_dicts_of_changing_lengths(
    mode: str, n_stages: int, alone: masked_model.Found
) -> None:
    losses, parameters = train(mode, n_stages)
    assert losses == alone[0]
    assert_same(parameters, alone[1])


def test_rolled_back_steps(alone: masked_model.Found) -> None:
    pipeline = make("ZBV", 2, post_validation=True)
    results = [pipeline.step(*cut(batch(step))) for step in range(10)]
    assert [(result.loss, result.grad_norm) for result in results] == alone[0]
    assert sum(result.rollbacks for result in results) > 5
    assert_same(dict(pipeline.named_parameters()), alone[1])


def train_rank(mode: str, rolls_back: bool) -> masked_model.Found:
    if not rolls_back:
        return train(mode, None)
    return train(mode, None, post_validation=True)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("mode", "n", "rolls_back"),
    [
        ("ZBV", 2, True),
        ("1F1B", 2, False),
        pytest.param("ZBH1", 4, True, marks=pytest.mark.slow),
    ],
)
def test_dicts_of_changing_lengths_between_processes(
    pool: Pool, mode: str, n: int, rolls_back: bool, alone: masked_model.Found
) -> None:
    parts = pool.run(train_rank, n, mode, rolls_back)
    assert all(losses == alone[0] for losses, _ in parts)
    assert_same({k: v for _, part in parts for k, v in part.items()}, alone[1])


class Writes(nn.Module):
    """Hands on the mask that it was given, and has written to it."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.at = at

    def forward(self, value: dict[str, Tensor]) -> dict[str, Tensor]:
        mask = value["mask"]
        if self.at == 2:
            mask.mul_(0.5)
        return {"x": self.linear(value["x"]) + mask, "mask": mask}


class Out(nn.Module):
    def forward(self, value: dict[str, Tensor]) -> Tensor:
        return value["x"]


def write_to_the_mask(mode: str, n_stages: int | None) -> list[float]:
    torch.manual_seed(0)
    layers = [*(Writes(at) for at in range(5)), Out()]
    pipeline = flat_pipeline(
        layers, loss_fn=nn.functional.mse_loss, optimizer=adamw, schedule=mode,
        n_stages=n_stages, n_microbatches=2, split="even",
    )  # fmt: skip
    x = torch.randn(4, 4)
    mask = torch.rand(4, 4)
    losses = []
    for _ in range(3):
        given = {"x": x, "mask": mask.clone()}
        losses.append(pipeline.step(given, x).loss)
    return losses


def test_a_mask_that_was_written_to_is_sent_again() -> None:
    assert write_to_the_mask("ZBV", 2) == write_to_the_mask("1F1B", 1)


@pytest.mark.dist
def test_a_mask_that_was_written_to_is_sent_again_between_processes(pool: Pool) -> None:
    expected = write_to_the_mask("1F1B", 1)
    assert pool.run(write_to_the_mask, 2, "ZBV", None) == [expected] * 2


def test_a_whole_batch_is_cut_by_the_model() -> None:
    """One that is a dict of all; a profile and a prediction take it as a step does."""
    layered = Layered(
        masked_model.N_LAYERS, build, loss_fn=loss_fn,
        cut_batch=lambda whole: cut({"labels": None, **whole}),
    )  # fmt: skip
    whole = batch(1)
    pipeline = Pipeline(
        layered, optimizer=None, schedule="ZBV", n_stages=2, n_microbatches=M
    )
    costs = pipeline.profile(whole, rounds=2, most_s=1.0).layers
    assert len(costs.f) == masked_model.N_LAYERS
    result = pipeline.step(whole)
    parts = [
        {name: x.tensor_split(M)[i] for name, x in whole.items()} for i in range(M)
    ]
    again = Pipeline(
        layered, optimizer=None, schedule="ZBV", n_stages=2, n_microbatches=M
    )
    assert again.step(parts).losses == result.losses
    assert pipeline.evaluate(whole) == again.evaluate(parts)
    unlabelled = cut(whole)[0]
    logits = pipeline.predict(unlabelled)["logits"]
    assert logits.shape[:2] == whole["labels"].shape
    assert torch.equal(logits, pipeline.predict(whole)["logits"])
