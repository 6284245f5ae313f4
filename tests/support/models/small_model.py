"""A small model, its data, and a plain torch loop to compare with."""

import torch
from flat import flat_pipeline
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.pipeline import Pipeline

N_LAYERS = 9


class Block(nn.Module):
    """Norm, two Linears, a skip: matmul weights and others."""

    def __init__(self, width: int = 16, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.dropout(self.down(hidden))


def build(layers: range, *, dropout: float = 0.0) -> list[nn.Module]:
    """Layers of an embedding model over 11 tokens, seeded one by one."""
    built: list[nn.Module] = []
    for index in layers:
        torch.default_generator.manual_seed(index)
        if index == 0:
            built.append(nn.Embedding(11, 16))
        elif index == N_LAYERS - 1:
            built.append(nn.Linear(16, 11))
        else:
            built.append(Block(dropout=dropout))
    return built


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def batch(step: int, samples: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 11, (samples, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def make_pipeline(mode: str, n_stages: int | None, **more: object) -> Pipeline:
    settings: dict[str, object] = {
        "n_layers": N_LAYERS,
        "loss_fn": loss_fn,
        "optimizer": adamw,
        "n_microbatches": 6,
    }
    settings |= more
    model = settings.pop("model", build)
    return flat_pipeline(model, schedule=mode, n_stages=n_stages, **settings)


Trace = tuple[list[tuple[float, float]], float, dict[str, Tensor]]
"""Loss and gradient norm of each step, validation loss, parameters by name."""


def train(mode: str, n_stages: int | None, *, steps: int = 3, **more: object) -> Trace:
    """Train a few steps and evaluate on an uneven batch."""
    pipeline = make_pipeline(mode, n_stages, **more)
    results = [pipeline.step(*batch(step)) for step in range(steps)]
    losses = [(result.loss, result.grad_norm) for result in results]
    validation = pipeline.evaluate(*batch(99, samples=7), n_microbatches=3)
    parameters = {n: p.detach().clone() for n, p in pipeline.named_parameters()}
    return losses, validation, parameters


def train_plainly(
    *, steps: int = 3, n_microbatches: int = 6, reverse: bool = False
) -> tuple[list[float], dict[str, Tensor]]:
    """The same without zbpp: one process, ``loss.backward()``, micro-batch by one."""
    model = nn.Sequential(*build(range(N_LAYERS)))
    optimizer = adamw(list(model.parameters()))
    losses = []
    for step in range(steps):
        inputs, targets = (x.tensor_split(n_microbatches) for x in batch(step))
        order = range(n_microbatches)
        each = {}
        for i in reversed(order) if reverse else order:
            each[i] = loss_fn(model(inputs[i]), targets[i])
            (each[i] / n_microbatches).backward()
        stacked = torch.stack([each[i].detach().double() for i in order])
        losses.append(float(stacked.mean()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {f"layers.{n}": p.detach() for n, p in model.named_parameters()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Equal to the last bit."""
    assert sorted(left) == sorted(right)
    for name, value in left.items():
        assert torch.equal(value, right[name]), f"{name} differs"


def refusal(function: object, *args: object, **more: object) -> str:
    """Call something that must refuse the request; return its message."""
    try:
        function(*args, **more)  # type: ignore[operator]
    except RequestError as error:
        return str(error)
    raise AssertionError("the request was not refused")
