"""A run resumes in any other place: schedule, stages, mesh, processes, plain loop.

    place 0: step 0, save | place 1: load, step 1, save | ..     is one plain loop

That such moves change no bit is in tests/state/test_histories.py.
"""

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from case_models import N_LAYERS
from cases import Case, Loop, make
from pool import Pool
from same import difference
from torch import Tensor, nn

import zbpp
from zbpp.checkpoint import load, newest, plain_state, read_model

CLIP = 5.0
EXTRA = {"position": [3, 0.1], "name": "a"}


@dataclass(frozen=True, kw_only=True)
class Place(Case):
    """Where a step is taken.

    Args:
        apart: each stage is a process.
        replicas: of each stage, in processes.
        shard: as in `zbpp.DataParallel`.
        plain: a plain loop takes the step, and a pipeline of the place has its state.
    """

    model: str = "counts, tied"
    samples: int = 16
    clip: float | None = CLIP
    post_validation: bool | None = True
    apart: bool = False
    replicas: int = 1
    shard: str = "none"
    plain: bool = False

    def place(self) -> dict[str, Any]:
        if self.replicas == 1:
            return super().place()
        mesh = zbpp.mesh(stages=self.n_stages, data_parallel=self.replicas)
        return {"mesh": zbpp.DataParallel(mesh=mesh, shard=self.shard)}

    def share(self, pipeline: zbpp.Pipeline, *batch: Tensor) -> tuple[Tensor, ...]:
        replica = pipeline.place.replica
        return tuple(part.chunk(self.replicas)[replica] for part in batch)


def thaw(model: nn.Sequential, step: int) -> None:
    """Two layers are frozen at times."""
    model[1].requires_grad_(step >= 2)
    model[4].requires_grad_(step < 3)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=20)


class Scheduled(Loop):
    """A plain loop with schedulers; it may go on from a checkpoint of a pipeline."""

    def __init__(self, place: Place, folder: Path | None = None) -> None:
        super().__init__(place)
        self.schedulers = [schedule_of(one) for one in self.optimizers]
        if folder is not None:
            have = {"optimizers": self.optimizers, "schedulers": self.schedulers}
            found = load(folder, self.model, **have)
            assert found["extra"] == EXTRA
            self.n_steps = found["step"]

    def step(self) -> None:
        thaw(self.model, self.n_steps)
        super().step()
        for one in self.schedulers:
            one.step()

    def state(self) -> dict[str, Any]:
        """All that it needs, by name."""
        return self.numbers() | {
            f"rates {i}": one.get_last_lr() for i, one in enumerate(self.schedulers)
        }


@cache
def expected(optimizer: str, n: int = 7) -> list[tuple[Any, dict[str, Any]]]:
    """Loss and norm of each step, and the state that it leaves."""
    loop, found = Scheduled(Place(optimizer=optimizer)), []
    for _ in range(n):
        loop.step()
        found.append((numbers_of(loop), loop.state()))
    return found


def numbers_of(loop: Loop) -> tuple[float, float]:
    return loop.shown["losses"][-1], loop.shown["norms"][-1]


def layers(place: Place, step: int = 0) -> nn.Sequential:
    model = nn.Sequential(*place.layers())
    thaw(model, step)
    return model


def leg(place: Place, folder: str, step: int) -> tuple[float, float]:
    """Go on from where the place before has ended, take a step, and save."""
    loop = Scheduled(place, Path(folder) if step else None)
    model = loop.model if place.plain else layers(place, step)
    if place.plain:
        loop.step()
        numbers = numbers_of(loop)
        state = plain_state(
            model, loop.optimizers, schedulers=loop.schedulers, step=loop.n_steps
        )
    with make(place, model=model) as pipeline:
        schedulers = [schedule_of(one) for one in pipeline.optimizers]
        pipeline.attach(*schedulers)
        if place.plain:
            pipeline.load_state_dict(state)
        else:
            extra = pipeline.load(folder, missing_ok=True)
            assert extra == (EXTRA if step else {}), "the first place finds nothing"
            result = pipeline.step(*place.share(pipeline, *place.batch(step)))
            for one in schedulers:
                one.step()
            numbers = result.loss, result.grad_norm
            assert result.rollbacks == (result.grad_norm > place.clip)
        assert pipeline.n_steps == step + 1
        pipeline.save(folder, extra=EXTRA, wait=True)
    return numbers


def leg_of_rank(settings: dict[str, Any], *args: Any) -> Any:
    """`leg` by what can be sent to a process, which has another module of this file."""
    return leg(Place(**settings), *args)


def relay(
    pool: Pool, places: Sequence[dict[str, Any]], optimizer: str, folder: Path
) -> None:
    """Compare each place with the plain loop: numbers, and what it has saved."""
    for step, settings in enumerate(places):
        args = {**settings, "optimizer": optimizer}, str(folder), step
        place = Place(**args[0])
        n = place.n_stages * place.replicas
        found = pool.run(leg_of_rank, n, *args) if place.apart else [leg_of_rank(*args)]
        numbers, state = expected(optimizer)[step]
        for one in found:
            assert difference(one, numbers, rounding=1e-7) is None
        left = Scheduled(place, folder).state()
        assert difference(left, state, rounding=1e-7) is None


ONE = {"mode": "1F1B", "n_stages": 1}
SHARDS = {"mode": "ZBV", "apart": True, "replicas": 2, "shard": "parameters"}
MESH = SHARDS | {"shard": "optimizer"}
PLAIN = {"plain": True}
RELAYS: list[tuple[str, list[dict[str, Any]]]] = [
    ("groups", [{"mode": "ZBV", "n_stages": 4}, {"n_stages": 3, "apart": True},
                {"mode": "VPP"} | PLAIN, ONE, SHARDS, {"apart": True} | PLAIN]),
    ("several", [{}, ONE | PLAIN, {"mode": "ZBV", "n_stages": 3}]),
    ("matrices", [{"mode": "ZBV"}, {"mode": "1F1B", "n_stages": 3}, {"n_stages": 4}]),
]  # fmt: skip
SLOW_RELAYS = [
    ("groups", [MESH, MESH | {"mode": "ZBH1"}, {"n_stages": 4, "apart": True}, SHARDS,
                SHARDS | ONE | {"replicas": 4}, MESH, ONE]),
    ("several", [MESH | PLAIN, {"mode": "VPP", "apart": True}, SHARDS]),
]  # fmt: skip


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore:.*no optimizer steps them:UserWarning")
@pytest.mark.parametrize(
    ("optimizer", "places"),
    [*RELAYS, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW_RELAYS)],
)
def test_a_run_resumes_on_other_stages_and_meshes(
    optimizer: str, places: list[dict[str, Any]], pool: Pool, tmp_path: Path
) -> None:
    assert {norm > CLIP for (_, norm), _ in expected(optimizer)} == {True, False}
    relay(pool, places, optimizer, tmp_path)


FORGET: dict[str, Callable[[Scheduled], object]] = {
    "nothing": lambda loop: None,
    "moments": lambda loop: loop.optimizers[0].state.clear(),
    "betas": lambda loop: loop.optimizers[0].param_groups[0].update(betas=(0.9, 0.9)),
    "scheduler": lambda loop: setattr(loop.schedulers[0], "last_epoch", 0),
    "buffers": lambda loop: loop.model[2].seen.zero_(),
}


@pytest.mark.parametrize("what", FORGET)
def test_leaving_out_a_part_of_the_state_changes_the_bits(
    what: str, pool: Pool, tmp_path: Path
) -> None:
    """The negative control: each part of the state makes a difference."""
    relay(pool, [{}], "groups", tmp_path)
    loop = Scheduled(Place(optimizer="groups"), tmp_path)
    FORGET[what](loop)
    loop.step()
    wanted = expected("groups")[1][1]
    found = difference(loop.state(), wanted, rounding=1e-7)
    assert (found is None) == (what == "nothing")


def test_trained_parameters_alone_resume_from_the_same_base(tmp_path: Path) -> None:
    place = Place(optimizer="groups")

    def make_frozen(n_stages: int, rest: float = 1.0) -> zbpp.Pipeline:
        model = layers(place, 2)
        for layer in model[1:-1:2]:
            layer.requires_grad_(False)
        model[0].bias.data *= rest
        return make(place, n_stages=n_stages, model=model)

    def losses(pipeline: zbpp.Pipeline, n: int) -> list[float]:
        return [pipeline.step(*place.batch(0)).loss for _ in range(n)]

    with make_frozen(2) as pipeline:
        first = losses(pipeline, 2)
        pipeline.save(tmp_path, trainable_only=True, wait=True)
        rest = losses(pipeline, 2)
    names = {name for name, p in pipeline.named_parameters() if p.requires_grad}
    assert read_model(tmp_path).keys() == names
    with make_frozen(1, rest=5.0) as other:
        other.load(tmp_path)
        assert losses(other, 2) == rest != first
    with pytest.raises(zbpp.RequestError, match=r"1\.weight is missing"):
        make(place, model=layers(place, 2)).load(tmp_path)


def test_weights_load_for_inference(pool: Pool, tmp_path: Path) -> None:
    """Also into two places."""
    relay(pool, [ONE], "groups", tmp_path)
    model = nn.ModuleDict({"a": layers(Place()), "b": layers(Place())})
    found = load(tmp_path, model, own_name=lambda name: name[2:])
    assert found == {"step": 1, "extra": EXTRA}
    for net in model.values():
        assert difference(net.state_dict(), read_model(tmp_path)) is None


def read_by_torch(folder: str, into: dict[str, Tensor]) -> None:
    from torch.distributed import checkpoint

    reader = checkpoint.HuggingFaceStorageReader(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it runs without processes
        checkpoint.load(into, storage_reader=reader, no_dist=True)


def read_shards(folder: str, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """The whole tensors that torch's reader loads into shards on another mesh."""
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
    relay(pool, [SHARDS], "groups", tmp_path / "new")
    folder = newest(tmp_path / "new")
    assert folder is not None
    files = [*folder.glob("*.safetensors")]
    pieces = [piece for file in files for piece in pieces_in(file)]
    assert len(files) == 4 and len({*pieces}) == len(pieces)
    model = read_model(folder)
    del model[f"{N_LAYERS - 1}.weight"]  # tied
    wanted = {f"model/{name}": x for name, x in model.items()}
    zeros = {name: torch.zeros_like(x) for name, x in wanted.items()}
    into = {name: x.clone() for name, x in zeros.items()}
    read_by_torch(str(folder), into)
    assert difference(into, wanted) is None
    linears = {name: x for name, x in zeros.items() if not name.endswith("seen")}
    for found in pool.run(read_shards, 2, str(folder), linears):
        assert difference(found, {name: wanted[name] for name in linears}) is None
