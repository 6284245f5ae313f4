"""Loaders are shared by replica, and a Trainer's arguments are not lost in silence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from zbpp.core import RequestError

pytest.importorskip("accelerate")


def batches(n_replicas: int, replica: int) -> list[list[int]]:
    from replica_loader import replica_loader

    place = SimpleNamespace(n_replicas=n_replicas, replica=replica)
    pipeline: Any = SimpleNamespace(place=place, device=torch.device("cpu"))
    rows: Any = torch.arange(24)
    loader = replica_loader(DataLoader(rows, batch_size=4), pipeline, rng_types=None)
    return [batch.tolist() for batch in loader]


def test_replicas_have_shares_and_stages_have_none() -> None:
    whole = [list(range(at, at + 4)) for at in range(0, 24, 4)]
    assert batches(1, 0) == whole
    assert batches(2, 0) == whole[::2]
    assert batches(2, 1) == whole[1::2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gradient_accumulation_steps": 2}, r"steps=2\) has no effect.*n_microbat"),
        ({"bf16": True}, r"bf16=True\) has no effect.*Numerics\(autocast"),
    ],
)
def test_arguments_that_a_pipeline_would_ignore_are_refused(
    options: dict[str, Any], words: str, tmp_path: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    from pipeline_trainer import PipelineTrainer

    more = {"use_cpu": True, "report_to": "none", **options}
    arguments = transformers.TrainingArguments(str(tmp_path), **more)
    with pytest.raises(RequestError, match=words):
        PipelineTrainer(torch.nn.Linear(2, 2), arguments, pipeline={})
