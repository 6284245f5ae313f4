"""What stops one rank at the start stops all of them, at once, with the same words."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import zbpp
from zbpp.runtime import PeerError

pytestmark = pytest.mark.dist

WORDS, WIDTH = 11, 8


class Model(nn.Module):
    """A GPT's shape; the head has the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.norm(x))
        return out


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def batch() -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (16, 6), generator=torch.Generator().manual_seed(0))
    return words, words.roll(1, 1)


def pipeline_of(model: Any, mode: Any = "1F1B", **more: Any) -> zbpp.Pipeline:
    settings: dict[str, Any] = {
        "loss_fn": loss_fn,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.5),
        "n_microbatches": 4,
        "device": "cpu",
        "execution": zbpp.Execution(timeout_s=30),
    }
    return zbpp.Pipeline(model, mode, **settings | more)


def layers(tied: bool = True) -> list[nn.Module]:
    model = Model()
    if not tied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return [model.table, *model.blocks, model.norm, model.head]


def cut() -> Any:
    return zbpp.cut(Model(), "blocks", before=["table", "head"], after=["norm", "head"])


# Tied embeddings and ZeRO.

SHARDS = ("none", "optimizer", "gradients", "parameters", "alternating")
Trained = tuple[list[float], dict[str, Tensor]]


def train(make: Callable[[], Any], mode: str, shard: str, mesh: Any) -> Trained:
    alternating = shard == "alternating"
    replicas = zbpp.DataParallel(
        mesh=mesh,
        shard="parameters" if alternating else shard,
        alternating_buffers=alternating,
    )
    with pipeline_of(make(), mode, mesh=replicas, clip_grad_norm=0.5) as pipeline:
        replica = pipeline.place.replica
        mine = [x.chunk(2)[replica] for x in batch()]
        results = [pipeline.step(*mine) for _ in range(3)]
        state = pipeline.state_dict()["model"]
        held = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in state.items()}
    return [x for r in results for x in (r.loss, r.grad_norm)], {
        name: p.detach().clone() for name, p in held.items()
    }


def train_sharded(name: str, shards: tuple[str, ...]) -> list[tuple[str, Trained]]:
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    make = cut if name == "cut" else layers
    return [
        (f"{shard} {mode}", train(make, mode, shard, mesh))
        for shard in shards
        for mode in ("1F1B", "ZBV")
    ]


@pytest.mark.parametrize(
    ("name", "shards"),
    [("list", SHARDS[:2]), pytest.param("list", SHARDS[2:], marks=pytest.mark.slow),
     ("cut", SHARDS[-2:])],
)  # fmt: skip
def test_tied_embeddings_with_shards(
    pool: Pool, name: str, shards: tuple[str, ...]
) -> None:
    make = cut if name == "cut" else layers
    plain = pipeline_of(make(), n_stages=1, n_microbatches=8, clip_grad_norm=0.5)
    results = [plain.step(*batch()) for _ in range(3)]
    expected = [x for r in results for x in (r.loss, r.grad_norm)]
    weights = plain.state_dict()["model"]
    for runs in pool.run(train_sharded, 4, name, shards):
        for what, (found, held) in runs:
            assert found == pytest.approx(expected, rel=1e-5), what
            assert held
            for key, value in held.items():
                torch.testing.assert_close(value, weights[key], rtol=1e-5, atol=1e-6)


# Refusals.


def builder(fault: Callable[[], Any]) -> Any:
    """Layers of which the last one, on the last rank alone, is built with a fault."""

    def build(indices: range) -> list[nn.Module]:
        made = layers(tied=False)[indices.start : indices.stop]
        return [*made[:-1], fault()] if indices.stop == 7 else made

    return zbpp.layers_from(build, n_layers=7)


def lost() -> nn.Module:
    raise FileNotFoundError("weights-7.bin")


def one_stage(named_parameters: list[tuple[str, nn.Parameter]]) -> Any:
    names = [name for name, _ in named_parameters]
    if "layers.6.weight" in names:
        return "adamw"
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)


def on_last(last: Any, other: Any) -> Any:
    return last if dist.get_rank() == dist.get_world_size() - 1 else other


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no module": (lambda: pipeline_of(builder(lambda: torch.relu)), "layer 6 is"),
    "on meta": (
        lambda: pipeline_of(builder(lambda: nn.Linear(8, 11, device="meta"))),
        "layers.6.weight is on the meta device",
    ),
    "optimizer": (
        lambda: pipeline_of(layers(tied=False), optimizer=one_stage),
        "the optimizer's builder gave a str",
    ),
    "argument": (
        lambda: pipeline_of(layers(tied=False), n_microbatches=on_last(0, 4)),
        "n_microbatches is 0",
    ),
    "file": (
        lambda: pipeline_of(layers(tied=False), on_last("/nowhere/plan.json", "ZBH1")),
        "/nowhere/plan.json",
    ),
    "model": (
        lambda: pipeline_of(on_last(Model(), layers(tied=False))),
        "cannot be cut into layers",
    ),
    "failure": (lambda: pipeline_of(builder(lost)), "weights-7.bin"),
}


def all_said() -> dict[str, tuple[str, str]]:
    dist.barrier()
    said = {}
    for name, (start, _) in CASES.items():
        try:
            start()
        except (zbpp.RequestError, PeerError, FileNotFoundError) as error:
            said[name] = type(error).__name__, str(error)
    with pipeline_of(layers(tied=False)) as pipeline:  # the control
        pipeline.step(*batch())
    return said


def test_a_refusal_of_one_rank_is_that_of_all(pool: Pool) -> None:
    one, last = pool.run(all_said, 2)
    for name, (_, words) in CASES.items():
        assert words in one[name][1], (name, one.get(name))
        if name == "failure":
            assert last[name][0] == "FileNotFoundError"
            assert one[name][0] == "PeerError" and "rank 1 failed" in one[name][1]
        else:
            assert one[name] == last[name] and one[name][0] == "RequestError", name


# Optimizers that step a part, or nothing.


class Scale(nn.Module):
    """No matrix, so a stage of these alone has nothing for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.gain)


def chooses(pattern: str) -> Callable[[Any], list[Any]]:
    def make(named_parameters: list[tuple[str, nn.Parameter]]) -> list[Any]:
        chosen = [p for name, p in named_parameters if pattern in name]
        return [torch.optim.SGD(chosen, lr=0.1)] if chosen else []

    return make


def start_and_step(pattern: str, frozen: bool, n_stages: int | None) -> list[str]:
    """All that is said, in warnings and in a refusal."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Scale(), Scale())
    model.requires_grad_(not frozen)
    x = torch.randn(8, WIDTH)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            pipeline = pipeline_of(
                model, "ZBH1", n_stages=n_stages, optimizer=chooses(pattern),
                loss_fn=nn.functional.mse_loss,
            )  # fmt: skip
        except zbpp.RequestError as error:
            return [f"refused: {error}"]
        for _ in range(3):
            pipeline.step(x, x)
        pipeline.close()
    texts = [str(w.message) for w in said]
    return [text for text in texts if "gains little" not in text]


HALF = "4 parameter(s) have gradients, but no optimizer steps them (0.bias, 1.bias, 2."


@pytest.mark.parametrize(
    ("pattern", "frozen", "words"),
    [
        ("", False, ""),
        ("weight", False, HALF),
        ("block.", False, "refused: optimizer= steps none of the 6 parameters"),
        ("", True, "all parameters of the model are frozen"),
        ("block.", True, "all parameters of the model are frozen"),
    ],
)
def test_what_is_not_trained_is_told_once(
    pool: Pool, pattern: str, frozen: bool, words: str
) -> None:
    one = start_and_step(pattern, frozen, 2)
    first, last = pool.run(start_and_step, 2, pattern, frozen, None)
    if words.startswith("refused"):
        assert last == first
    else:
        assert not last
    assert one == first
    assert len(one) == bool(words) and all(words in text for text in one)


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward, as the model asks for it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.front = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class InLayer(nn.Module):
    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return out


def in_layers(reentrant: bool) -> Any:
    model = Checkpointed(reentrant)
    return [model.front, *(InLayer(block, reentrant) for block in model.blocks)]


def cut_checkpointed(reentrant: bool) -> Any:
    return zbpp.cut(Checkpointed(reentrant), "blocks", before=["front"])


def first_losses(model: Any) -> list[float]:
    x = torch.arange(64.0).view(8, WIDTH) / 64
    mse = nn.functional.mse_loss
    with pipeline_of(model, "1F1B", n_stages=2, loss_fn=mse) as pipeline:
        return [pipeline.step(x, x).loss for _ in range(2)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_reentrant_checkpoints() -> None:
    expected = first_losses(cut_checkpointed(False))
    assert first_losses(in_layers(False)) == first_losses(in_layers(True)) == expected
    with pytest.raises(zbpp.RequestError, match="needs use_reentrant=False"):
        first_losses(cut_checkpointed(True))
