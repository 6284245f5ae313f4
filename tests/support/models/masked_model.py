"""A model whose layers hand on dicts: mask, positions, numbers, an extra loss.

The batch is one dict, padded to the longest of its samples, so that its shape changes
from step to step.
"""

from typing import Any

import torch
from flat import flat_pipeline
from small_model import adamw
from torch import Tensor, nn

from zbpp.pipeline import Pipeline

WIDTH, VOCABULARY, N_LAYERS, M = 8, 13, 9, 4
IGNORED = -100


class First(nn.Module):
    """From the batch to what the blocks hand on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        ids = batch["input_ids"]
        shared = {"mask": batch["mask"], "places": batch["places"]}
        return {
            "hidden": self.embed(ids),
            "shared": shared,
            "twice": [batch["mask"], {"rate": 0.5, "name": "x"}],
            "cache": None,
            "router": (self.embed.weight.new_zeros(()),),
        }


class Block(nn.Module):
    """Attention that looks at the mask and the places; adds to the extra loss."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        assert value["cache"] is None and value["twice"][1] == {
            "rate": 0.5,
            "name": "x",
        }
        assert value["twice"][0] is value["shared"]["mask"]
        x, mask = value["hidden"], value["shared"]["mask"]
        q = self.query(x)
        distance = (value["shared"]["places"] - value["shared"]["places"].mT).abs()
        scores = q @ x.mT - distance.to(x.dtype)
        scores = scores.masked_fill(~mask[:, None, :], -1e9)
        y = x + self.out(scores.softmax(-1) @ x)
        extra = value["router"][0] + q.square().mean() * value["twice"][1]["rate"]
        return {**value, "hidden": y, "router": (extra,)}


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, value: dict[str, Any]) -> dict[str, Tensor]:
        return {"logits": self.head(value["hidden"]), "extra": value["router"][0]}


def build(layers: range) -> list[nn.Module]:
    kinds = {0: First, N_LAYERS - 1: Last}
    built = []
    for index in layers:
        torch.manual_seed(index)
        built.append(kinds.get(index, Block)())
    return built


def loss_fn(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    logits = outputs["logits"].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED)
    return loss + 0.01 * outputs["extra"]


def batch(step: int, samples: int = 8) -> dict[str, Tensor]:
    """A padded batch; its length depends on the step."""
    generator = torch.Generator().manual_seed(step)
    most = 4 + step * 5 % 9
    lengths = torch.randint(2, most, (samples,), generator=generator)
    longest = int(lengths.max())
    ids = torch.randint(0, VOCABULARY, (samples, longest), generator=generator)
    mask = torch.arange(longest) < lengths[:, None]
    labels = ids.roll(-1, 1).masked_fill(~mask, IGNORED)
    places = torch.arange(longest).expand(samples, 1, longest)
    return {"input_ids": ids, "mask": mask, "places": places, "labels": labels}


def cut(whole: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
    """Inputs and targets."""
    inputs = {name: x for name, x in whole.items() if name != "labels"}
    return inputs, whole["labels"]


def make(mode: str, n_stages: int | None, **more: Any) -> Pipeline:
    settings = {"optimizer": adamw, "n_microbatches": M, "clip_grad_norm": 0.5} | more
    return flat_pipeline(
        settings.pop("model", build), n_layers=N_LAYERS, loss_fn=loss_fn,
        schedule=mode, n_stages=n_stages, **settings,
    )  # fmt: skip


Found = tuple[list[tuple[float, float]], dict[str, Tensor]]


def train(mode: str, n_stages: int | None, *, steps: int = 10, **more: Any) -> Found:
    """Loss and norm of every step, and the parameters."""
    pipeline = make(mode, n_stages, **more)
    results = [pipeline.step(*cut(batch(step))) for step in range(steps)]
    found = [(result.loss, result.grad_norm) for result in results]
    parameters = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    pipeline.close()
    return found, parameters
