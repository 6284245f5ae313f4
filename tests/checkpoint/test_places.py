"""A run goes on in any other place: schedule, stages, mesh, processes, plain loop.

    place 0: step 0, save | place 1: load, step 1, save | ..     is one plain loop

That such moves change no bit is in tests/state/test_histories.py.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors
import torch
from pool import Pool
from torch import Tensor, nn

import zbpp
from zbpp.checkpoint import load, newest, plain_state, read_model

N_LAYERS, WIDTH, M, CLIP = 8, 8, 4, 5.0
EXTRA = {"position": [3, 0.1], "name": "a"}


class Place(NamedTuple):
    """Where a step is taken; ``apart``: each stage is a process.

    ``plain``: a plain loop takes the step, and a pipeline of the place has its state.
    """

    mode: str
    stages: int
    apart: bool = False
    replicas: int = 1
    shard: str = "none"
    plain: bool = False


class Layer(nn.Module):
    """Counts its forwards in one buffer, and has another one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + torch.tanh(self.linear(x))


def layers(step: int = 0) -> nn.Sequential:
    """The first and the last layer share a weight; two others are frozen at times."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(N_LAYERS)))
    model[-1].linear.weight = model[0].linear.weight
    thaw(model, step)
    return model


def thaw(model: nn.Sequential, step: int) -> None:
    model[1].requires_grad_(step >= 2)
    model[4].requires_grad_(step < 3)


def two_groups(parameters: Any) -> list[torch.optim.Optimizer]:
    """Matrices decay, vectors do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 2e-2},
    ]
    return [torch.optim.AdamW(groups, lr=1e-2)]


def two_kinds(parameters: Any) -> list[torch.optim.Optimizer]:
    """As Muon is used: one optimizer for the matrices, another one for the rest."""
    parameters = list(parameters)
    return [
        torch.optim.SGD([p for p in parameters if p.dim() > 1], momentum=0.9),
        torch.optim.AdamW([p for p in parameters if p.dim() < 2]),
    ]


def matrices(parameters: Any) -> list[torch.optim.Optimizer]:
    """Nothing steps the rest, and it counts in no norm."""
    return [torch.optim.SGD([p for p in parameters if p.dim() > 1], momentum=0.9)]


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Every second step is clipped."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 16, WIDTH, generator=generator, dtype=torch.float64)
    return x, (0.2 * y + x if step % 2 else y)


# The plain loop.

Numbers = tuple[float, float | None]
"""Loss and norm of a step."""


class Loop:
    """A plain training; it may go on from a checkpoint of a pipeline."""

    def __init__(self, optimizer: Any, folder: Path | None = None) -> None:
        self.model, self.n_steps = layers(), 0
        self.optimizers = optimizer(self.model.parameters())
        self.schedulers = [schedule_of(one) for one in self.optimizers]
        if folder is not None:
            have = {"optimizers": self.optimizers, "schedulers": self.schedulers}
            found = load(folder, self.model, **have)
            assert found["extra"] == EXTRA
            self.n_steps = found["step"]

    def step(self) -> Numbers:
        thaw(self.model, self.n_steps)
        losses = []
        for x, y in zip(*(t.chunk(M) for t in batch(self.n_steps)), strict=True):
            loss = nn.functional.mse_loss(self.model(x), y)
            (loss / M).backward()
            losses.append(loss.item())
        groups = [group for one in self.optimizers for group in one.param_groups]
        stepped = [p for group in groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(stepped, CLIP)
        for one in (*self.optimizers, *self.schedulers):
            one.step()
        self.model.zero_grad()
        self.n_steps += 1
        return sum(losses) / M, float(norm)

    def state(self) -> dict[str, Tensor]:
        """All that it needs, by name."""
        state = dict(self.model.state_dict())
        for i, one in enumerate(self.optimizers):
            state[f"rates {i}"] = torch.tensor(self.schedulers[i].get_last_lr())
            for name, p in self.model.named_parameters():
                moments = one.state.get(p, {}).items()
                state |= {f"{name} {key}": x for key, x in moments}
        return {name: x.detach().clone() for name, x in state.items()}


@cache
def expected(optimizer: Any, n: int = 7) -> list[tuple[Numbers, dict[str, Tensor]]]:
    loop = Loop(optimizer)
    return [(loop.step(), loop.state()) for _ in range(n)]


def assert_close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)


# The places.


def make(place: Place, optimizer: Any, model: nn.Sequential) -> zbpp.Pipeline:
    where: dict[str, Any] = {}
    if not place.apart:
        where["n_stages"] = place.stages
    elif place.replicas > 1:
        mesh = zbpp.mesh(stages=place.stages, data_parallel=place.replicas)
        where["mesh"] = zbpp.DataParallel(mesh=mesh, shard=place.shard)
    return zbpp.Pipeline(
        model,
        place.mode,
        loss_fn=nn.functional.mse_loss,
        optimizer=optimizer,
        n_microbatches=M,
        clip_grad_norm=CLIP,
        step=zbpp.StepPolicy(post_validation=True),
        **where,
    )


def leg(place: Place, optimizer: Any, folder: str, step: int) -> Numbers:
    """Go on from where the place before has ended, take a step, and save."""
    source = Path(folder) if step else None
    loop = Loop(optimizer, source)
    model = loop.model if place.plain else layers(step)
    if place.plain:
        numbers = loop.step()
        state = plain_state(
            model, loop.optimizers, schedulers=loop.schedulers, step=loop.n_steps
        )
    with make(place, optimizer, model) as pipeline:
        schedulers = [schedule_of(one) for one in pipeline.optimizers]
        pipeline.attach(*schedulers)
        if place.plain:
            pipeline.load_state_dict(state)
        else:
            extra = pipeline.load(folder, missing_ok=True)
            assert extra == (EXTRA if step else {}), "the first place finds nothing"
            replica = pipeline.place.replica
            parts = (part.chunk(place.replicas)[replica] for part in batch(step))
            result = pipeline.step(*parts)
            for one in schedulers:
                one.step()
            numbers = result.loss, result.grad_norm
            assert result.rollbacks == (result.grad_norm > CLIP)
        assert pipeline.n_steps == step + 1
        pipeline.save(folder, extra=EXTRA, wait=True)
    return numbers


def leg_of_rank(place: tuple[Any, ...], optimizer: str, *args: Any) -> Numbers:
    """`leg` by what can be sent to a process, which has another module of this file."""
    return leg(Place(*place), globals()[optimizer], *args)


def relay(pool: Pool, places: Sequence[Place], optimizer: Any, folder: Path) -> None:
    """Compare each place with the plain loop: numbers, and what it has saved."""
    for step, place in enumerate(places):
        args = tuple(place), optimizer.__name__, str(folder), step
        n = place.stages * place.replicas
        found = pool.run(leg_of_rank, n, *args) if place.apart else [leg_of_rank(*args)]
        numbers, state = expected(optimizer)[step]
        for one in found:
            assert_close(one, numbers)
        assert_close(Loop(optimizer, folder).state(), state)


ONE = Place("1F1B", 1)
SHARDS = Place("ZBV", 2, True, 2, "parameters")
MESH = SHARDS._replace(shard="optimizer")
RELAYS: list[tuple[Callable[[Any], Any], list[Place]]] = [
    (
        two_groups,
        [
            Place("ZBV", 4), Place("ZBH1", 3, True), Place("VPP", 2, plain=True),
            Place("ZBV", 2, True), ONE, SHARDS, Place("ZBH1", 2, True, plain=True),
        ],
    ),
    (two_kinds, [Place("ZBH1", 2), ONE._replace(plain=True), Place("ZBV", 3)]),
    (matrices, [Place("ZBV", 2), Place("1F1B", 3), ONE, Place("ZBH1", 4)]),
]  # fmt: skip
SLOW_RELAYS = [
    (
        two_groups,
        [
            MESH, MESH._replace(mode="ZBH1"), Place("ZBH1", 4, True), SHARDS,
            Place("1F1B", 1, True, 4, "parameters"), MESH, ONE,
        ],
    ),
    (two_kinds, [MESH._replace(plain=True), Place("VPP", 2, True), SHARDS]),
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.*no optimizer steps them:UserWarning")
@pytest.mark.parametrize(
    ("optimizer", "places"),
    [*RELAYS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_RELAYS)],
)
def test_a_run_goes_on_elsewhere(
    optimizer: Any, places: list[Place], pool: Pool, tmp_path: Path
) -> None:
    assert {norm > CLIP for (_, norm), _ in expected(optimizer)} == {True, False}
    relay(pool, places, optimizer, tmp_path)


FORGET: dict[str, Callable[[Loop], object]] = {
    "nothing": lambda loop: None,
    "moments": lambda loop: loop.optimizers[0].state.clear(),
    "betas": lambda loop: loop.optimizers[0].param_groups[0].update(betas=(0.9, 0.9)),
    "scheduler": lambda loop: setattr(loop.schedulers[0], "last_epoch", 0),
    "buffers": lambda loop: loop.model[2].seen.zero_(),
}


@pytest.mark.parametrize("what", FORGET)
def test_a_part_that_is_not_restored_is_noticed(
    what: str, pool: Pool, tmp_path: Path
) -> None:
    """The negative control: each part of the state makes a difference."""
    relay(pool, [Place("ZBH1", 2)], two_groups, tmp_path)
    loop = Loop(two_groups, tmp_path)
    FORGET[what](loop)
    loop.step()
    is_same = True
    try:
        assert_close(loop.state(), expected(two_groups)[1][1])
    except AssertionError:
        is_same = False
    assert is_same == (what == "nothing")


def test_trained_parameters_alone_go_on_from_the_same_base(tmp_path: Path) -> None:
    def make_frozen(n_stages: int, rest: float = 1.0) -> zbpp.Pipeline:
        model = layers(2)
        for layer in model[1:-1:2]:
            layer.linear.requires_grad_(False)
        model[0].linear.bias.data *= rest
        return make(Place("ZBH1", n_stages), two_groups, model)

    def losses(pipeline: zbpp.Pipeline, n: int) -> list[float]:
        return [pipeline.step(*batch(0)).loss for _ in range(n)]

    with make_frozen(2) as pipeline:
        first = losses(pipeline, 2)
        pipeline.save(tmp_path, trainable_only=True, wait=True)
        rest = losses(pipeline, 2)
    names = {name for name, p in pipeline.named_parameters() if p.requires_grad}
    assert read_model(tmp_path).keys() == names
    with make_frozen(1, rest=5.0) as other:
        other.load(tmp_path)
        assert losses(other, 2) == rest != first
    with pytest.raises(zbpp.RequestError, match=r"1\.linear\.weight is missing"):
        make(ONE, two_groups, layers(2)).load(tmp_path)


def test_weights_for_inference(pool: Pool, tmp_path: Path) -> None:
    """Also into two places."""
    relay(pool, [ONE], two_groups, tmp_path)
    model = nn.ModuleDict({"a": layers(), "b": layers()})
    found = load(tmp_path, model, own_name=lambda name: name[2:])
    assert found == {"step": 1, "extra": EXTRA}
    for net in model.values():
        assert_same(net.state_dict(), read_model(tmp_path))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def read_by_torch(folder: str, into: dict[str, Tensor]) -> None:
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it runs without processes
        checkpoint.load(into, storage_reader=reader, no_dist=True)


def read_shards(folder: str, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """What torch's reader puts into shards on a mesh of its own, whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = zbpp.mesh(stages=1, data_parallel=2)["dp"]
    into = {x: distribute_tensor(y, mesh, [Shard(0)]) for x, y in whole.items()}
    read_by_torch(folder, into)
    return {name: x.full_tensor() for name, x in into.items()}


def pieces_in(file: Path) -> list[tuple[str, Any]]:
    """The shards in a file, by name and offset."""
    with safetensors.safe_open(file, framework="pt") as opened:
        about = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
    return [(name, str(of_shard)) for name, of_shard in about.items()]


@pytest.mark.dist
def test_torch_alone_reads_what_four_processes_have_sharded(
    pool: Pool, tmp_path: Path
) -> None:
    """Whole, and into shards on another mesh."""
    relay(pool, [SHARDS], two_groups, tmp_path / "new")
    folder = newest(tmp_path / "new")
    assert folder is not None
    files = [*folder.glob("*.safetensors")]
    pieces = [piece for file in files for piece in pieces_in(file)]
    assert len(files) == 4 and len({*pieces}) == len(pieces)
    model = read_model(folder)
    del model[f"{N_LAYERS - 1}.linear.weight"]  # tied
    wanted = {f"model/{name}": x for name, x in model.items()}
    zeros = {name: torch.zeros_like(x) for name, x in wanted.items()}
    into = {name: x.clone() for name, x in zeros.items()}
    read_by_torch(str(folder), into)
    assert_same(into, wanted)
    linears = {name: x for name, x in zeros.items() if ".linear." in name}
    for found in pool.run(read_shards, 2, str(folder), linears):
        assert_same(found, {name: wanted[name] for name in linears})
