"""Inputs of recomputed layers in slices along ``tp``: same bits, fewer bytes."""

import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Shown, difference, merged, run
from meshes import MeshCase
from pool import Pool
from ranks import end_of
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zbpp
from zbpp.runtime.testing import inject

pytestmark = pytest.mark.dist

# ---- Bits.

of_tp = partial(MeshCase, kind="tp", clip=2.7)
CASES = [
    of_tp(mode="1F1B", recompute="all"),
    of_tp(mode="ZBH1", recompute="all", numbers="autocast", autocast=True),
    of_tp(mode="ZBV", recompute="all", switch="ZBV"),
    of_tp(mode="ZBV", recompute=(1, 3, 6), within=True),
]


def run_all(cases: list[MeshCase]) -> list[Shown]:
    return [run(case) | {"each": None} for case in cases]


def test_slices_change_no_bit(pool: Pool) -> None:
    """Steps that are rolled back are among them."""
    each = [replace(x, partition_activations=on) for x in CASES for on in (False, True)]
    shown = [merged(x) for x in zip(*pool.run(run_all, 4, each), strict=True)]
    for case, whole, sliced in zip(CASES, shown[::2], shown[1::2], strict=True):
        assert difference(sliced, whole) is None, case
        assert sliced["rollbacks"] > 0


def trained(
    layers: list[Any], mode: Any, loss_fn: Any, *, n: int = 2, **more: Any
) -> tuple[list[float], list[Tensor]]:
    """Losses and parameters of layers on n processes along ``tp``."""
    execution = zbpp.Execution(
        timeout_s=60.0, partition_activations=more.pop("partition_activations", True)
    )
    settings: dict[str, Any] = {
        "n_microbatches": 4,
        "mesh": zbpp.mesh(stages=1, tensor_parallel=n, device="cpu"),
        "device": "cpu",
        "execution": execution,
    }
    plan = zbpp.plan_model(layers, mode, recompute="all", **settings)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    x = x.to(next(layers[0].parameters()).dtype)
    with zbpp.Pipeline(
        layers, plan, loss_fn=loss_fn, optimizer=optimizer, **settings
    ) as pipeline:
        losses = [pipeline.step(x, x.flip(0)).loss for _ in range(3)]
        return losses, [p.detach().clone() for _, p in pipeline.named_parameters()]


class Several(nn.Module):
    """Hands on a strided tensor, whole numbers, and one tensor twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value, value > 0, (value, value)
        h, mask, (before, same) = value
        y = self.linear(h + before) * torch.where(mask, 1, 2) + same
        return y.mT.contiguous().mT, mask, (h, h)


def several(*, partition_activations: bool) -> Any:
    """In bfloat16 three processes share 2 x 5 numbers unevenly."""
    torch.manual_seed(0)
    layers = [Several().bfloat16() for _ in range(4)]

    def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs[0], targets)

    how = {"n": 3, "partition_activations": partition_activations}
    return trained(layers, "ZBV", loss_fn, **how)


def both(function: Callable[..., Any]) -> list[Any]:
    return [function(partition_activations=on) for on in (False, True)]


def several_both() -> list[Any]:
    return both(several)


def test_values_of_several_tensors_may_be_cut_anywhere(pool: Pool) -> None:
    for whole, sliced in pool.run(several_both, 3):
        assert whole[0] == sliced[0] and whole[0][0] != whole[0][2]
        assert all(map(torch.equal, whole[1], sliced[1]))


# ---- Bytes.

WIDTH, ROWS, M = 64, 16, 4
INPUT = 4 * WIDTH * ROWS


class Living(TorchDispatchMode):
    """Storages of a kilobyte or more that operators make, and their all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, Any] = {}
        self.n_gathers = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.n_gathers += func.namespace == "c10d" and "allgather" in func.name()
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self.made[storage._cdata] = weakref.ref(storage)
        return result

    def n_bytes(self) -> int:
        sizes = [x.nbytes() for ref in self.made.values() if (x := ref()) is not None]
        return sum(size for size in sizes if size >= 1024)


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return dy.clone(), None


class Noting(nn.Linear):
    """Keeps weak references to its inputs; calls a function as its backward begins."""

    def __init__(self, note: Callable[[], None]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.inputs: list[Any] = []
        self.note = note

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            self.inputs.append(weakref.ref(x.untyped_storage()))
        result: Tensor = _Noted.apply(super().forward(x), self.note)
        return result


def kept(*, partition_activations: bool) -> tuple[int, int, int]:
    """Bytes of whole inputs, and of all, before the first B; all-gathers of a step."""
    found: list[tuple[int, int]] = []
    living = Living()

    def note() -> None:
        alive = [ref() for layer in layers for ref in layer.inputs]
        whole = {x._cdata: x.nbytes() for x in alive if x is not None}
        found.append((sum(whole.values()), living.n_bytes()))

    torch.manual_seed(0)
    layers = [Noting(note) for _ in range(6)]
    settings: dict[str, Any] = {
        "n_microbatches": M,
        "mesh": zbpp.mesh(stages=2, tensor_parallel=2),
        "device": "cpu",
        "execution": zbpp.Execution(partition_activations=partition_activations),
    }
    plan = zbpp.plan_model(layers, "FThenB", recompute="all", **settings)
    loss_fn = nn.functional.mse_loss
    with zbpp.Pipeline(
        layers, plan, loss_fn=loss_fn, optimizer=None, **settings
    ) as pipeline:
        x = torch.randn(M * ROWS, WIDTH)
        pipeline.step(x, x)
        found.clear()
        with living:
            pipeline.step(x, x)
    return *found[0], living.n_gathers


def kept_both() -> list[Any]:
    return both(kept)


def test_each_of_two_processes_keeps_half_of_the_inputs(pool: Pool) -> None:
    """One all-gather each brings them back; the batch is the caller's, and whole."""
    ranks = pool.run(kept_both, 4)
    for rank, (today, sliced) in enumerate(ranks):
        n_inputs = M * (2 if rank < 2 else 3)  # of three layers, two on the first stage
        assert today[0] == n_inputs * INPUT and today[2] == 0, "the control"
        assert sliced[0] == 0 and sliced[2] == n_inputs
        assert today[1] - sliced[1] == n_inputs * INPUT / 2


def planned_bytes(*, partition_activations: bool) -> float:
    """Memory that F leaves, by a plan that measures."""
    x = torch.randn(M * ROWS, WIDTH)
    plan = zbpp.plan_model(
        [nn.Linear(WIDTH, WIDTH) for _ in range(4)],
        "1F1B",
        n_microbatches=M,
        example=(x, x),
        recompute="all",
        loss_fn=nn.functional.mse_loss,
        mesh=zbpp.mesh(stages=1, tensor_parallel=2),
        device="cpu",
        execution=zbpp.Execution(partition_activations=partition_activations),
    )
    return sum(plan.chunk_costs.m_b)


def planned_both() -> list[Any]:
    return both(planned_bytes)


def test_plans_that_measure_know_it(pool: Pool) -> None:
    for whole, sliced in pool.run(planned_both, 2):
        assert sliced == whole / 2 > 0


# ---- Other communication, errors and refusals.


class _Sum(torch.autograd.Function):
    """A mean over a group, to which its second process comes late."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        y = x.detach().clone()
        time.sleep(0.02 * group.rank())
        dist.all_reduce(y, group=group)
        return y / 2

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _Sum.forward(ctx, dy, ctx.group), None


class Summing(nn.Linear):
    """Communicates along ``tp`` while another pass computes."""

    group: dist.ProcessGroup

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        total: Tensor = zbpp.overlap_point(_Sum.apply, hidden, self.group)
        return x + total


def overlapping(*, partition_activations: bool) -> Any:
    torch.manual_seed(0)
    Summing.group = zbpp.mesh(stages=1, tensor_parallel=2).get_group("tp")
    layers, how = [Summing(5, 5) for _ in range(4)], partition_activations
    loss_fn = nn.functional.mse_loss
    return trained(layers, "DualPipeV", loss_fn, partition_activations=how)


def overlapping_both() -> list[Any]:
    return both(overlapping)


def test_gathers_wait_for_the_communication_of_other_passes(pool: Pool) -> None:
    for whole, sliced in pool.run(overlapping_both, 2):
        assert whole[0] == sliced[0]
        assert all(map(torch.equal, whole[1], sliced[1]))


class Placed(nn.Linear):
    """Hands on other numbers on each process."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + dist.get_rank()


def ended(kind: type[nn.Linear], fault: str, on: bool) -> str:
    """The error that ends a training of layers; empty: none does."""
    torch.manual_seed(0)
    layers = [kind(5, 5) for _ in range(3)]
    loss_fn = nn.functional.mse_loss
    try:
        with inject(fault):
            trained(layers, "1F1B", loss_fn, partition_activations=on)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def other_numbers(*, partition_activations: bool) -> str:
    return ended(Placed, "raise:7:0:0F0", partition_activations)


def test_inputs_that_differ_are_refused() -> None:
    for rank in end_of(other_numbers_both, 2):
        fine, words = rank.value
        assert fine == ""
        assert "layers.1 (layer 1) reads other numbers on each process" in words
        assert "leave partition_activations out" in words and "\n" not in words


def other_numbers_both() -> list[Any]:
    return both(other_numbers)


def failing() -> str:
    return ended(nn.Linear, "raise:1:1:0BW0", on=True)


def test_a_gather_that_ends_in_vain_names_the_process_that_failed() -> None:
    waiting, failed = (rank.value for rank in end_of(failing, 2))
    assert failed == "RuntimeError: a fault that the test asks for"
    assert waiting.startswith("PeerError: stage 0 waits in 0BW0 for its replicas")
    assert "rank 1 failed first, in 0BW0" in waiting
