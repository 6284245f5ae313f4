"""Layers that communicate twice, as a mixture of experts does; they note what runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from torch import Tensor, nn

import zbpp
from zbpp.pipeline import Pipeline
from zbpp.runtime import executor
from zbpp.runtime.overlap import OpenPass, Overlap

PATIENCE_S = 30.0
"""For the other half, which comes at once where it comes at all."""
WIDTH, N_MICROBATCHES = 8, 6


class Log:
    """What the halves of pairs have computed and communicated, in order."""

    def __init__(self) -> None:
        self.computed: list[str] = []
        self.communicated: list[str] = []
        self.beside: list[str] = []
        """Communications that lasted until something else was computed."""
        self.patience_s = 0.0
        self.is_alone = False
        """Nothing was computed beside a communication, and patience is over."""
        self.left: dict[str, int] = {}
        """How much was computed when each half came to its last point."""
        self._grown = Condition()

    def compute(self, name: str) -> None:
        with self._grown:
            self.computed.append(name)
            self._grown.notify_all()

    def communicate(self, name: str) -> None:
        """Take as long as it takes until something is computed, in a pair."""
        with self._grown:
            before = self.left.get(name[0], len(self.computed))
            self.communicated.append(name)
            if self._grown.wait_for(
                lambda: len(self.computed) > before, self.patience_s
            ):
                self.beside.append(name)
            elif self.patience_s:
                self.is_alone, self.patience_s = True, 0.0


LOG = Log()


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, note: str) -> Tensor:
        ctx.name, ctx.note = name, note
        getattr(LOG, note)(f"F {name}")
        return x.flip(0) if note == "communicate" else x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        getattr(LOG, ctx.note)(f"B {ctx.name}")
        return dy.flip(0) if ctx.note == "communicate" else dy.clone(), None, None


def exchange(x: Tensor, name: str) -> Tensor:
    result: Tensor = _Noted.apply(x, name, "communicate")
    return result


def noted(x: Tensor, name: str) -> Tensor:
    result: Tensor = _Noted.apply(x, name, "compute")
    return result


class Talking(nn.Module):
    """attention | dispatch | experts | combine, and a skip.

    Args:
        index: of the layer.
        dropout: behind the experts.
        norm: makes a norm of a width, before attention.
        communicate: both times.
    """

    def __init__(
        self,
        index: int,
        *,
        dropout: float = 0.0,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        communicate: Callable[..., Tensor] = exchange,
    ) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index, self._communicate = index, communicate
        self.norm, self.dropout = norm(WIDTH), nn.Dropout(dropout)
        self.attention, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def _part(self, name: str, y: Tensor) -> Tensor:
        return noted(y, f"{name}{self.index}")

    def forward(self, x: Tensor) -> Tensor:
        hidden = self._part("attention", torch.tanh(self.attention(self.norm(x))))
        hidden = zbpp.overlap_point(
            self._communicate, hidden, name=f"dispatch{self.index}"
        )
        hidden = self._part("experts", self.dropout(self.experts(hidden)))
        return x + zbpp.overlap_point(
            self._communicate, hidden, name=f"combine{self.index}"
        )


def talking(n_layers: int, **how: Any) -> nn.Sequential:
    return nn.Sequential(*(Talking(index, **how) for index in range(n_layers)))


def make(model: nn.Module, mode: str = "DualPipeV", **more: Any) -> Pipeline:
    settings: dict[str, Any] = {
        "n_stages": 1,
        "n_microbatches": N_MICROBATCHES,
        "loss_fn": nn.functional.mse_loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "device": "cpu",
    }
    return flat_pipeline(model, schedule=mode, **(settings | more))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 2 * N_MICROBATCHES, WIDTH, generator=generator)
    return x, y


Outcome = tuple[list[tuple[float, float, int]], dict[str, Tensor]]


def train(pipeline: Pipeline, *, steps: int = 3) -> Outcome:
    """Losses, norms and rollbacks of some steps, and the state after them."""
    torch.manual_seed(5)  # of what draws without a seed of its own
    results = [pipeline.step(*batch(step)) for step in range(steps)]
    numbers = [(x.loss, x.grad_norm, x.rollbacks) for x in results]
    state = {k: x.detach().clone() for k, x in pipeline.named_parameters()}
    for index, layer in pipeline.stages.layers():
        state |= {f"{index} {k}": x.clone() for k, x in layer.named_buffers()}
    pipeline.close()
    return numbers, state


@contextmanager
def pairs_noted(patience_s: float = PATIENCE_S) -> Iterator[dict[str, Log]]:
    """Within this, pairs that run in turns get logs of their own, by their names."""
    logs: dict[str, Log] = {}
    plain, leave = executor.PairHandler._run_in_turns, OpenPass.leave

    def leaving(self: OpenPass) -> None:
        LOG.left["F" if self.is_forward else "B"] = len(LOG.computed)
        leave(self)

    def noted(self: executor.PairHandler, overlap: Overlap) -> None:
        global LOG
        before = LOG
        is_alone = any(log.is_alone for log in logs.values())
        LOG = logs[str(self.instruction)] = Log()
        LOG.patience_s = 0.0 if is_alone else patience_s
        try:
            plain(self, overlap)
        finally:
            LOG = before

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor.PairHandler, "_run_in_turns", noted)
        patch.setattr(OpenPass, "leave", leaving)
        yield logs
