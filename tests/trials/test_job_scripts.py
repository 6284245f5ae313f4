"""What a job script meets: its first start, wrong numbers of processes, print."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import zbpp
import zbpp.checkpoint

X, Y = torch.ones(2, 4, 6)


def make(n_stages: int | None = 2, **more: Any) -> zbpp.Pipeline:
    torch.manual_seed(0)
    return zbpp.Pipeline(
        [nn.Linear(6, 6) for _ in range(4)],
        "ZBH1",
        loss_fn=nn.functional.mse_loss,
        optimizer=torch.optim.SGD,
        n_stages=n_stages,
        n_microbatches=2,
        **more,
    )


def start(folder: str, n_stages: int | None = 2) -> tuple[Any, int]:
    """One start of a job: it resumes if it can, takes a step and saves."""
    pipeline = make(n_stages)
    extra = pipeline.load(folder, missing_ok=True)
    pipeline.step(X, Y)
    pipeline.save(folder, extra={"place": pipeline.n_steps}, wait=True)
    pipeline.close()
    return extra, pipeline.n_steps


@pytest.mark.parametrize("exists", [True, False])
def test_the_first_start_of_a_job_finds_no_checkpoint(
    tmp_path: Path, exists: bool
) -> None:
    folder = tmp_path if exists else tmp_path / "new"
    assert [start(str(folder)) for _ in range(2)] == [({}, 1), ({"place": 1}, 2)]
    with pytest.raises(zbpp.checkpoint.CheckpointError, match="no checkpoint in"):
        make().load(tmp_path / "other")


def test_a_damaged_checkpoint_is_not_a_missing_one(tmp_path: Path) -> None:
    start(str(tmp_path))
    (tmp_path / "step-00000001" / "manifest.json").write_text("{}")
    with pytest.raises(zbpp.checkpoint.CheckpointError, match="can be loaded"):
        make().load(tmp_path, missing_ok=True)


@pytest.mark.dist
def test_processes_start_alike(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(start, 2, str(tmp_path), None) == [({}, 1)] * 2
    assert pool.run(start, 2, str(tmp_path), None) == [({"place": 1}, 2)] * 2


def refusal(n_stages: int) -> str:
    with pytest.raises(zbpp.RequestError) as caught:
        make(n_stages)
    return str(caught.value)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("n_stages", "words"),
    [
        (1, r"or run replicas: mesh=zbpp.mesh(stages=1, data_parallel=2)"),
        (3, "2 processes cannot run 3 stages; start one process a stage"),
    ],
)
def test_replicas_are_named_where_they_fit(
    pool: Pool, n_stages: int, words: str
) -> None:
    assert all(text.endswith(words) for text in pool.run(refusal, 2, n_stages))


def test_pipeline_and_result_can_be_printed() -> None:
    pipeline = make()
    result = pipeline.step(X, Y)
    assert repr(pipeline) == (
        "<zbpp.Pipeline: ZBH1, 4 layers, 2 stages (here 0, 1), 2 micro-batches, "
        "1 steps done>"
    )
    assert (
        str(result)
        == repr(result)
        == (
            f"StepResult(loss={result.loss:.6g}, grad_norm={result.grad_norm:.6g}, "
            "skipped=False, rollbacks=0)"
        )
    )
