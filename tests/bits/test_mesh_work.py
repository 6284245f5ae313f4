"""The work of a mesh: collectives, memory, checkpoints, profiles, compiled layers."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import make
from mesh_model import Dense, MeshModel
from meshes import MeshCase
from pool import Pool
from ranks import end_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zbpp
from zbpp import diagnostics
from zbpp.checkpoint import read_model
from zbpp.runtime.testing import plain_kernels

pytestmark = pytest.mark.dist

WIDTH, N_MICROBATCHES = 256, 4
LAYER = 4 * WIDTH * WIDTH
"""Bytes of a layer's parameters."""


def linears(n: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(n)]


def replicas(
    n_layers: int, mode: str, n_stages: int = 1, n: int = N_MICROBATCHES, **options: Any
) -> zbpp.Pipeline:
    """A pipeline of two replicas; nothing steps its parameters."""
    mesh = zbpp.mesh(stages=n_stages, data_parallel=2)
    return zbpp.Pipeline(
        linears(n_layers),
        mode,
        loss_fn=nn.functional.mse_loss,
        optimizer=None,
        n_microbatches=n,
        device="cpu",
        mesh=zbpp.DataParallel(mesh=mesh, **options),
    )


def steps(pipeline: zbpp.Pipeline, mode: Any = None) -> None:
    """Take a step, within a dispatch mode if one is given."""
    x = torch.randn(N_MICROBATCHES, WIDTH)
    for _, p in pipeline.named_parameters():
        p.grad = None
    with mode or nullcontext():
        pipeline.step(x, x)


# ---- Collectives.


class Collectives(TorchDispatchMode):
    """Names of collectives, with the bytes and the address of their largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::").strip("_").split("_")[0]
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            whole = max(tensors, key=lambda x: x.nbytes)
            self.found.append((name, whole.nbytes, whole.data_ptr()))
        return func(*args, **(kwargs or {}))


SHARDS: dict[str, dict[str, Any]] = {
    "none": {},
    "optimizer": {"shard": "optimizer"},
    "gradients": {"shard": "gradients"},
    "parameters": {"shard": "parameters"},
    "buffers": {"shard": "parameters", "alternating_buffers": True},
}


def count_collectives(n_layers: int) -> dict[str, dict[str, int]]:
    found = {}
    for name, options in SHARDS.items():
        with replicas(n_layers, "1F1B", **options) as pipeline:
            steps(pipeline)
            steps(pipeline, collectives := Collectives())
        found[name] = dict(Counter(x for x, *_ in collectives.found))
        assert {n_bytes for _, n_bytes, _ in collectives.found} == {LAYER}
    return found


def test_a_step_has_the_collectives_of_its_shards(pool: Pool) -> None:
    """As in docs/reference/data_parallel.md: m sums of a layer, or one."""
    n, m = 3, N_MICROBATCHES
    for found in pool.run(count_collectives, 2, n):
        assert found == {
            "none": {"allreduce": n},
            "optimizer": {"allgather": n, "reduce": n},
            "gradients": {"allgather": n, "reduce": n * m},
            "parameters": {"allgather": 2 * n * m, "reduce": n * m},
            "buffers": {"allgather": 2 * n * m, "reduce": n * m},
        }


def in_pieces(piece_bytes: int | None) -> tuple[list[tuple[int, int]], list[float]]:
    """Bytes and address of every gather of a step, and losses of three.

    Each process has 1364 bytes of the first layer, and 1240 of the second.
    """
    torch.manual_seed(0)
    x, layers = torch.randn(8, 10), [nn.Linear(10, 61), nn.Linear(61, 10)]
    with zbpp.Pipeline(
        layers,
        "ZBH1",
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        n_microbatches=N_MICROBATCHES,
        device="cpu",
        mesh=zbpp.DataParallel(
            mesh=zbpp.mesh(stages=1, data_parallel=2),
            shard="parameters",
            gather_piece_bytes=piece_bytes,
        ),
    ) as pipeline:
        losses = [pipeline.step(x, x).loss for _ in range(2)]
        with Collectives() as collectives:
            losses.append(pipeline.step(x, x).loss)
    gathers = [(n, at) for name, n, at in collectives.found if name == "allgather"]
    return gathers, losses


def test_gathers_in_pieces_have_the_same_bits(pool: Pool) -> None:
    wholes, losses = zip(*pool.run(in_pieces, 2, None), strict=True)
    for gathers in wholes:
        assert all(n % 32 for n, _ in gathers)  # of two processes
    for n_bytes in (256, 16, 2**20):
        parts = pool.run(in_pieces, 2, n_bytes)
        for whole, (pieces, found) in zip(wholes, parts, strict=True):
            assert found == losses[0]
            assert all(n % 32 == 0 and n <= 2 * n_bytes for n, _ in pieces)
            assert all(at % 16 == 0 for _, at in pieces)
            each = sum(-(-n // 2 // n_bytes) for n, _ in whole)
            assert len(pieces) == each


def timed_jobs() -> dict[str, tuple[float, float]]:
    """Start and end of this stage's jobs in a step."""
    with replicas(8, "ZBV", 2, shard="optimizer") as pipeline:
        steps(pipeline)
        timeline = diagnostics.timeline(pipeline)
        stage = pipeline.place.pipeline.index(pipeline.place.rank)
        slots = (*timeline.rows[stage], *timeline.collectives[stage])
        return {str(slot.job): (slot.start, slot.end) for slot in slots}


def test_sums_begin_within_the_last_weight_pass(pool: Pool) -> None:
    for jobs in pool.run(timed_jobs, 4):
        chunks = [name[0] for name in jobs if name.endswith("REDUCE_GRAD")]
        assert len(chunks) == 2
        n_at_once = 0
        for chunk in chunks:
            start, end = jobs[f"{chunk}REDUCE_GRAD"]
            last = max(jobs[f"{chunk}W{i}"] for i in range(N_MICROBATCHES))
            assert last[0] < start < last[1]
            n_at_once += sum(start < a and b < end for a, b in jobs.values())
        assert n_at_once > 0


# ---- Memory.


def addresses(mode: str) -> list[list[int]]:
    """Where whole layers are gathered, and where gradients are summed from."""
    with replicas(5, mode, **SHARDS["buffers"]) as pipeline:
        steps(pipeline)
        steps(pipeline, collectives := Collectives())
    return [
        [address for x, _, address in collectives.found if x == name]
        for name in ("allgather", "reduce")
    ]


@pytest.mark.parametrize("mode", ["ZBH1", "1F1B"])
def test_layers_alternate_between_two_buffers(pool: Pool, mode: str) -> None:
    for gathers, sums in pool.run(addresses, 2, mode):
        assert len(gathers) == 2 * len(sums) == 2 * 5 * N_MICROBATCHES
        for places in (gathers, sums):
            assert all(a != b for a, b in pairwise(places))
            assert len(set(places)) == 2


class Detached(nn.Linear):
    """Its backward, which gathers the layer before it, ends here."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def losses_behind_a_detach(shard: str) -> list[float]:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(6)]
    layers[3] = Detached(8, 8)
    x = torch.randn(8, 8)
    with zbpp.Pipeline(
        layers,
        "ZBH1",
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=0.5),
        n_microbatches=2,
        device="cpu",
        mesh=zbpp.DataParallel(
            mesh=zbpp.mesh(stages=1, data_parallel=2), **SHARDS[shard]
        ),
    ) as pipeline:
        return [pipeline.step(x, x.flip(0)).loss for _ in range(3)]


def test_an_overwritten_gathered_layer_is_gathered_again(pool: Pool) -> None:
    """Others have had its buffer since."""
    found = pool.run(losses_behind_a_detach, 2, "buffers")
    assert found == pool.run(losses_behind_a_detach, 2, "parameters")


# ---- Checkpoints.


def save_shards(folder: str) -> int:
    """The most bytes of a collective in a save."""
    with replicas(3, "1F1B", shard="parameters") as pipeline:
        steps(pipeline)
        with Collectives() as collectives:
            pipeline.save(folder, wait=True)
    return max((n_bytes for _, n_bytes, _ in collectives.found), default=0)


def test_a_save_gathers_no_layer(pool: Pool, tmp_path: Path) -> None:
    for most in pool.run(save_shards, 2, str(tmp_path)):
        assert most < LAYER / 2
    saved = read_model(tmp_path)
    expected = nn.Sequential(*linears(3)).state_dict()
    torch.testing.assert_close(
        saved, {f"layers.{name}": p for name, p in expected.items()}, rtol=0, atol=0
    )


# ---- Neighbours, slices and profiles.


def see_forwards() -> bool:
    """True if neighbours along ``tp`` have seen the same in all their forwards.

    Every step is clipped. One neighbour could decide by itself, as it counts the plain
    gradients, and the other one has none to count.
    """
    mesh = zbpp.mesh(stages=2, tensor_parallel=2)
    model = MeshModel(mesh, dtype=torch.float32)
    seen = []

    def look(_: nn.Module, __: Any, output: Tensor) -> None:
        both = torch.zeros(2)
        both[mesh["tp"].get_local_rank()] = output.detach().sum()
        dist.all_reduce(both, group=mesh.get_group("tp"))
        seen.append(bool(both[0] == both[1]))

    for block in model.blocks:
        block.norm.register_forward_hook(look) if hasattr(block, "norm") else None
        if isinstance(block, Dense):
            block.up.requires_grad_(False)
            block.down.requires_grad_(False)
    case = MeshCase(kind="tp", mode="ZBH1", clip=1e-3)
    with make(case, model=model.layers()) as pipeline:
        for step in range(3):
            batch = case.share(pipeline, *case.batch(step))
            assert pipeline.step(*batch).rollbacks == 1
    return all(seen)


@pytest.mark.nightly
@pytest.mark.slow
def test_neighbours_compute_the_same_before_a_rollback(pool: Pool) -> None:
    """A layer may choose by it what it communicates, as a router does."""
    assert all(pool.run(see_forwards, 4))


def profiled(kind: str) -> bool:
    with make(case := MeshCase(kind=kind)) as pipeline:
        batch = case.share(pipeline, *case.batch(0))
        profile = diagnostics.profile(pipeline, *batch, rounds=2)
    return min((*profile.layers.f, *profile.layers.w)) > 0


@pytest.mark.slow
def test_a_profile_measures_layers_that_wait_for_each_other(pool: Pool) -> None:
    assert all(pool.run(profiled, 4, "ep"))


class Meeting(nn.Module):
    """Adds its input over neighbours, in a way; one of them fails before."""

    def __init__(self, mesh: Any, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.group, self.how, self.n_calls = mesh.get_group("tp"), how, 0

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_reduce

        self.n_calls += 1
        if self.n_calls == 2 and self.group.rank() == 1:
            raise RuntimeError("Connection closed by peer")
        total = x.detach().clone()
        if self.how == "torch":
            dist.all_reduce(total, group=self.group)
        else:
            total = all_reduce(total, "sum", self.group) + 0
        return self.linear(x) + total


def meet(how: str) -> tuple[str, str]:
    """The error of this process, by class and words."""
    mesh = zbpp.mesh(stages=1, tensor_parallel=2)
    torch.manual_seed(0)
    execution = zbpp.Execution(timeout_s=20.0)
    pipeline = zbpp.Pipeline(
        [Meeting(mesh, how)], "1F1B", loss_fn=nn.functional.mse_loss, optimizer=None,
        n_microbatches=2, device="cpu", mesh=mesh, execution=execution,
    )  # fmt: skip
    try:
        pipeline.step(torch.ones(4, 4), torch.ones(4, 4))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("how", ["torch", "functional"])
def test_an_error_of_a_layer_is_not_attributed_to_a_neighbour(how: str) -> None:
    """Nor the other way round: what a layer waits for in vain is the peer's fault."""
    (other, words), (kind, text) = (rank.value for rank in end_of(meet, 2, how))
    assert kind == "RuntimeError" and text.startswith("Connection closed by peer")
    assert other == "PeerError"
    assert "rank 1 failed first, in 0F1: RuntimeError: Connection closed" in words


# ---- Compiled layers.


def compiled_numbers() -> tuple[list[list[tuple[float, float | None]]], int]:
    """Losses and norms of compiled 1F1B and ZBH1 and of ZBH1 as it is; graphs."""
    mesh = zbpp.mesh(stages=1, data_parallel=2)  # another one would compile once more
    found: list[Any] = []
    x = torch.randn(4, 4, 9, generator=torch.Generator().manual_seed(3)).double()
    with plain_kernels() as graphs:
        for mode, compiled in (("1F1B", "blocks"), ("ZBH1", "blocks"), ("ZBH1", False)):
            torch.manual_seed(0)
            with zbpp.Pipeline(
                [Dense().double() for _ in range(3)],
                mode,
                loss_fn=nn.functional.mse_loss,
                optimizer=partial(torch.optim.SGD, lr=0.1),
                n_microbatches=2,
                clip_grad_norm=0.5,
                device="cpu",
                mesh=zbpp.DataParallel(mesh=mesh, shard="parameters"),
                execution=zbpp.Execution(compile=compiled),
            ) as pipeline:
                results = [pipeline.step(x, x.flip(0)) for _ in range(2)]
            found.append([(one.loss, one.grad_norm) for one in results])
    return found, len(graphs)


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_layers_train_like_eager_layers(pool: Pool) -> None:
    for (whole, split, eager), n_graphs in pool.run(compiled_numbers, 2):
        assert n_graphs >= 2  # a forward and a backward
        assert whole == split
        torch.testing.assert_close(split, eager, rtol=1e-9, atol=0)
