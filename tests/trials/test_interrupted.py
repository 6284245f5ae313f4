"""An exception or Ctrl-C inside a step ends the pipeline; its state is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool
from torch import Tensor, nn

import zbpp
from zbpp.runtime import PeerError

# a hook on the first layer warns that its input needs no gradient
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

INTERRUPTED = 2
"""Step, from 0."""


class Fault(torch.autograd.Function):
    """The identity; raises in a backward when armed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: list[BaseException]) -> Tensor:
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.error:
            raise ctx.error[0]
        return gradient, None


class Layer(nn.Module):
    """Has a running mean; ``errors`` by the pass in which they are raised."""

    def __init__(self, errors: dict[str, list[BaseException]]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self._errors = errors

    def forward(self, x: Tensor) -> Tensor:
        if self._errors["F"]:
            raise self._errors["F"][0]
        return Fault.apply(self.norm(self.linear(x)), self._errors["B"])


def make(
    schedule: str, n_stages: int | None, post_validation: bool
) -> tuple[zbpp.Pipeline, nn.Sequential, dict[str, list[BaseException]]]:
    torch.manual_seed(0)
    errors: dict[str, list[BaseException]] = {"F": [], "B": []}
    none: dict[str, list[BaseException]] = {"F": [], "B": []}
    model = nn.Sequential(Layer(errors), *(Layer(none) for _ in range(3)))
    pipeline = flat_pipeline(
        model,
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        schedule=schedule,
        n_stages=n_stages,
        n_microbatches=2,
        post_validation=post_validation,
        timeout_s=60.0,
    )
    return pipeline, model, errors


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
    return x, y


def refusals(pipeline: zbpp.Pipeline, folder: Path) -> list[str]:
    calls = (
        lambda: pipeline.step(*batch(0)),
        lambda: pipeline.save(folder),
        pipeline.state_dict,
        pipeline.synchronize,
        lambda: pipeline.evaluate(*batch(0)),
        lambda: pipeline.load(folder),
    )
    texts = []
    for call in calls:
        with pytest.raises(RuntimeError) as refused:
            call()
        texts.append(str(refused.value))
    return texts


@pytest.mark.parametrize("post_validation", [True, False])
@pytest.mark.parametrize(
    ("schedule", "where", "error"),
    [
        ("ZBH1", "B", ZeroDivisionError("no luck")),
        ("1F1B", "F", KeyboardInterrupt()),
        ("ZBV", "B", KeyboardInterrupt()),
    ],
)
def test_the_state_is_refused_in_one_line(
    schedule: str,
    where: str,
    error: BaseException,
    post_validation: bool,
    tmp_path: Path,
) -> None:
    pipeline, model, errors = make(schedule, 2, post_validation)
    for step in range(INTERRUPTED):
        pipeline.step(*batch(step))
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    pipeline.save(tmp_path, wait=True)
    errors[where].append(error)
    with pytest.raises(type(error)):
        pipeline.step(*batch(INTERRUPTED))
    (text,) = set(refusals(pipeline, tmp_path))
    assert text.startswith(f"step {INTERRUPTED} failed ({type(error).__name__}")
    assert f"load the last checkpoint, from {tmp_path}" in text
    assert "\n" not in text
    model.state_dict()  # the modules are the caller's again
    errors[where].clear()
    again, model, _ = make(schedule, 2, post_validation)
    with again:
        again.load(tmp_path)
        assert again.n_steps == INTERRUPTED
        for name, x in model.state_dict().items():
            assert torch.equal(x, saved[name]), name
        again.step(*batch(INTERRUPTED))


def test_without_a_checkpoint_the_line_says_so(tmp_path: Path) -> None:
    pipeline, _, errors = make("ZBH1", 2, True)
    pipeline.step(*batch(0))
    errors["F"].append(ValueError("first line\nsecond line"))
    with pytest.raises(ValueError, match="first line"):
        pipeline.step(*batch(1))
    (text,) = set(refusals(pipeline, tmp_path))
    assert "step 1 failed (ValueError: first line)" in text
    assert "no checkpoint was saved or loaded" in text


def test_the_same_modules_serve_a_new_pipeline(tmp_path: Path) -> None:
    pipeline, model, errors = make("ZBH1", 2, True)
    pipeline.step(*batch(0))
    pipeline.save(tmp_path, wait=True)
    errors["B"].append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        pipeline.step(*batch(1))
    errors["B"].clear()
    with zbpp.Pipeline(
        model,
        "1F1B",
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.05),
        n_stages=2,
        n_microbatches=2,
    ) as again:
        again.load(tmp_path)
        again.step(*batch(1))
        assert again.n_steps == 2
        model.state_dict()


def interrupt_rank_0(schedule: str, folder: str) -> list[str]:
    pipeline, _, errors = make(schedule, None, True)
    for step in range(INTERRUPTED):
        pipeline.step(*batch(step))
    pipeline.save(folder, wait=True)
    if pipeline.rank == 0:
        errors["B"].append(ValueError("rank 0 has had enough"))
    try:
        pipeline.step(*batch(INTERRUPTED))
        pipeline.step(*batch(INTERRUPTED))
    except (ValueError, PeerError) as error:
        return [str(error), *set(refusals(pipeline, Path(folder)))]
    return ["nothing was raised"]


@pytest.mark.dist
@pytest.mark.parametrize("schedule", ["1F1B", "ZBH1"])
def test_all_processes_refuse(schedule: str, pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(interrupt_rank_0, 2, schedule, str(tmp_path))
    assert first[0] == "rank 0 has had enough"
    assert "rank 0 failed first" in second[0]
    for texts in (first, second):
        assert len(texts) == 2
        assert str(tmp_path) in texts[1]
