"""Layers from a function: the plain model's weights, or a refusal that says how."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import zbpp

N_LAYERS = 8
SEED = "torch.manual_seed(seed + index)"
TIE = "ties=[((0, 'weight'), (7, 'weight'))]"

Build = Callable[[range], list[nn.Module]]


class Decay(nn.Module):
    """A layer whose first parameter is the same in all layers, as Mamba's is."""

    def __init__(self) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.arange(1.0, 17.0).log().repeat(8, 1))
        self.scale = nn.Parameter(torch.linspace(-1, 1, 8))
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) * self.scale + self.log.sum())


def unseeded(layers: range) -> list[nn.Module]:
    return [nn.Linear(8, 8) for _ in layers]


def reseeded(layers: range) -> list[nn.Module]:
    torch.manual_seed(0)
    return unseeded(layers)


def by_index(layers: range) -> list[nn.Module]:
    made: list[nn.Module] = []
    for index in layers:
        torch.manual_seed(index)
        made.append(Decay())
    return made


def alike(layers: range) -> list[nn.Module]:
    """All layers are meant to begin as copies of one."""
    torch.manual_seed(0)
    block = nn.Linear(8, 8)
    return [copy.deepcopy(block) for _ in layers]


def tied() -> list[nn.Module]:
    torch.manual_seed(0)
    table, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    head.weight = table.weight
    return [table, *(nn.Linear(8, 8) for _ in range(N_LAYERS - 2)), head]


def tied_by_call(layers: range) -> list[nn.Module]:
    return tied()[layers.start : layers.stop]


def tied_by_layer(layers: range) -> list[nn.Module]:
    return [tied()[index] for index in layers]


def pipeline_of(model: Any, mode: str, n_stages: int | None, **more: Any) -> Any:
    return zbpp.Pipeline(
        model, mode, n_stages=n_stages, n_microbatches=4, device="cpu",
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        execution=zbpp.Execution(timeout_s=30), **{"loss_fn": mse_loss} | more,
    )  # fmt: skip


def layers_of(build: Build, **more: Any) -> Any:
    return zbpp.layers_from(build, n_layers=N_LAYERS, **more)


def said(build: Build, mode: str, n_stages: int | None = None) -> str:
    torch.manual_seed(0)
    try:
        pipeline_of(layers_of(build), mode, n_stages, loss_fn=words_loss).close()
    except zbpp.RequestError as error:
        return str(error)
    return ""


def words_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("mode", ["1F1B", "VPP", "ZBV"])
def test_one_process_draws_what_the_plain_model_draws(mode: str) -> None:
    torch.manual_seed(0)
    pipeline = pipeline_of(layers_of(unseeded), mode, 2)
    torch.manual_seed(0)
    plain = nn.Sequential(*unseeded(range(N_LAYERS))).state_dict()
    state = pipeline.state_dict()["model"]
    assert len(state) == len(plain)
    assert all(torch.equal(state[f"layers.{name}"], x) for name, x in plain.items())


CASES: list[tuple[Build, str, str]] = [
    (unseeded, "1F1B", SEED),
    (unseeded, "ZBV", SEED),
    (reseeded, "VPP", SEED),
    (tied_by_call, "1F1B", TIE),
    (tied_by_layer, "1F1B", TIE),
    (by_index, "1F1B", ""),
    (alike, "1F1B", ""),
]


def all_said() -> list[str]:
    return [said(build, mode) for build, mode, _ in CASES]


@pytest.mark.dist
def test_equal_draws_on_two_processes_are_refused(pool: Pool) -> None:
    one, other = pool.run(all_said, 2)
    assert one == other
    for (build, mode, words), text in zip(CASES, one, strict=True):
        assert bool(text) == bool(words) and words in text, (build, mode, text)


@pytest.mark.parametrize(
    ("build", "words"),
    [(tied_by_layer, TIE), (tied_by_call, "share a parameter"), (by_index, "")],
)
def test_a_tie_without_its_name_is_refused(build: Build, words: str) -> None:
    text = said(build, "1F1B", 2)
    assert bool(text) == bool(words) and words in text


def test_a_tie_with_its_name_is_trained_as_in_one_stage() -> None:
    words = torch.arange(48).view(8, 6) * 7 % 11
    tie = [((0, "weight"), (N_LAYERS - 1, "weight"))]
    losses = [
        [
            pipeline_of(
                layers_of(build, ties=ties), "1F1B", n, loss_fn=words_loss
            ).step(words, words).loss
        ]
        for build, ties, n in ((tied_by_call, (), 1), (tied_by_layer, tie, 2))
    ]  # fmt: skip
    assert losses[0] == losses[1]
