"""Replicas that use other parameters in a step: what one has not used counts as 0."""

from functools import partial
from typing import Any

import pytest
import torch
from flat import flat_pipeline
from pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import zbpp
from zbpp.checkpoint.tensors import whole
from zbpp.runtime.parallel import buckets

pytestmark = pytest.mark.dist

WIDTH, STEPS, N_MICROBATCHES = 8, 3, 4
UNUSED = 3
"""The expert that nobody uses."""


class Experts(nn.Module):
    """Four equal experts, of which each micro-batch names those that it uses.

    A micro-batch that uses none leaves out the whole layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, uses = given
        for expert, is_used in zip(self.experts, uses.bool().any(0), strict=True):
            if is_used:
                x = x + expert(x).tanh()
        return x, uses


class Ends(nn.Module):
    """A Linear whose input or output has the experts beside it."""

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.is_last = is_last

    def forward(self, given: tuple[Tensor, Tensor]) -> Any:
        x, uses = given
        return self.linear(x) if self.is_last else (self.linear(x), uses)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    experts = [Experts() for _ in range(6)]
    return [Ends(is_last=False), *experts, Ends(is_last=True)]


USES = {
    "other experts": [[[1, 1, 0, 0]] * 4, [[0, 1, 1, 0]] * 4],
    "by micro-batch": [
        [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0]],
        [[0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 1, 0]],
    ],
    "no layer": [[[1, 1, 1, 0]] * 4, [[0, 0, 0, 0]] * 4],
}
"""Of each replica and micro-batch, the experts."""


def batch(step: int, replica: int, uses: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    x, y = torch.randn(2, 2 * N_MICROBATCHES, WIDTH, generator=generator)
    used = torch.tensor(USES[uses][replica]).repeat_interleave(2, dim=0)
    return (x, used), y


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def train(mode: str, shard: Any, uses: str, **more: Any) -> dict[str, Tensor]:
    """Two stages, two replicas; the whole parameters of this process at the end."""
    mesh = zbpp.mesh(stages=2, data_parallel=2)
    with flat_pipeline(
        layers(),
        loss_fn=nn.functional.mse_loss,
        optimizer=adamw,
        schedule=mode,
        n_microbatches=N_MICROBATCHES,
        mesh=mesh,
        shard=shard,
        **more,
    ) as pipeline:
        for step in range(STEPS):
            pipeline.step(*batch(step, pipeline.place.replica, uses))
        found = {}
        for name, layer in pipeline.named_layers():
            for own, p in layer.named_parameters(prefix=name):
                found[own] = whole(p).detach().clone()
    return found


def train_all(cases: list[tuple[str, str, str, dict[str, Any]]]) -> list[Any]:
    return [train(mode, shard, uses, **more) for mode, shard, uses, more in cases]


def train_plainly(uses: str) -> dict[str, Tensor]:
    """One process, all micro-batches of both replicas."""
    model = nn.Sequential(*layers())
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        for replica in range(2):
            (x, used), y = batch(step, replica, uses)
            cut = partial(Tensor.tensor_split, sections=N_MICROBATCHES)
            for part in zip(*map(cut, (x, used, y)), strict=True):
                loss = nn.functional.mse_loss(model(part[:2]), part[2])
                (loss / (2 * N_MICROBATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"layers.{name}": p.detach() for name, p in model.named_parameters()}


def assert_equal_plain(
    pool: Pool, cases: list[tuple[str, str, str, dict[str, Any]]]
) -> None:
    runs = pool.run(train_all, 4, cases)
    for (_, _, uses, _), *at_rank in zip(cases, *runs, strict=True):
        plain = train_plainly(uses)
        first = dict(layers()[1].named_parameters())
        together = {name: p for found in at_rank for name, p in found.items()}
        assert together.keys() == plain.keys()
        for found in at_rank:
            for name, p in found.items():
                assert torch.equal(p, together[name]), f"{name}: replicas differ"
                torch.testing.assert_close(p, plain[name], rtol=1e-5, atol=1e-6)
        # AdamW would let it decay if it had a gradient of zeros.
        unused = f"experts.{UNUSED}.weight"
        assert torch.equal(together[f"layers.1.{unused}"], first[unused])


@pytest.mark.slow
def test_unused_parameters_count_as_zeros(pool: Pool) -> None:
    assert_equal_plain(
        pool,
        [
            ("ZBH1", "none", "other experts", {}),
            ("ZBV", "optimizer", "other experts", {}),
            ("ZBH1", "gradients", "by micro-batch", {}),
            ("ZBV", "parameters", "by micro-batch", {"alternating_buffers": True}),
            ("ZBH1", "none", "no layer", {}),
        ],
    )


def train_partly(shard: Any) -> list[Tensor]:
    """One stage whose layers come wrapped in part, so that `shard` leaves the rest."""
    mesh = zbpp.mesh(stages=1, data_parallel=2)
    made = partly()
    for layer in made:
        fully_shard(layer[0], mesh=mesh["dp"])
    with flat_pipeline(
        made,
        loss_fn=nn.functional.mse_loss,
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        schedule="ZBH1",
        n_microbatches=2,
        mesh=mesh,
        shard=shard,
    ) as pipeline:
        x = torch.ones(8, WIDTH).cumsum(0).tensor_split(2)[pipeline.place.replica]
        pipeline.step(x, x)
        pipeline.synchronize()
        return [layer[1].weight.detach().clone() for layer in made]


def partly() -> list[nn.Sequential]:
    torch.manual_seed(0)
    two = [(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    return [nn.Sequential(*linears) for linears in two]


def test_layers_wrapped_in_part_are_summed_once(pool: Pool) -> None:
    model = nn.Sequential(*partly())
    x = torch.ones(8, WIDTH).cumsum(0)
    nn.functional.mse_loss(model(x), x).backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    for found in pool.run(train_partly, 2, "gradients"):
        for p, layer in zip(found, model, strict=True):
            torch.testing.assert_close(p, layer[1].weight, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_in_other_ways(pool: Pool) -> None:
    """With whole layers in parts each pass gathers its layer, so all must run it."""
    assert_equal_plain(
        pool,
        [
            ("ZBV", "none", "by micro-batch", {}),
            ("1F1B", "optimizer", "by micro-batch", {}),
            ("ZBH2", "optimizer", "no layer", {}),
            ("ZBV", "gradients", "other experts", {}),
            ("1F1B", "gradients", "no layer", {}),
            ("ZBH2", "parameters", "other experts", {}),
        ],
    )


class Tables(nn.Module):
    """A table of vectors for each replica's words; a bigger word is of the second."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(6, WIDTH) for _ in range(2))

    def forward(self, words: Tensor) -> Tensor:
        number = int(words.max() >= 6)
        made: Tensor = self.tables[number](words - 6 * number)
        return made


def read_tables(is_broken: bool) -> list[bool]:
    """Gradients of tables that two processes hold in parts, and one replica reads.

    Each is whole where it was read, and in parts, of zeros, where it was not.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    words = torch.tensor([[0, 1, 5, 5], [6, 9, 7, 7]])
    target = torch.randn(2, 4, WIDTH)
    plain, layer = Tables(), Tables()
    layer.load_state_dict(plain.state_dict())
    nn.functional.mse_loss(
        torch.cat([plain(words[:1]), plain(words[1:])]), target
    ).backward()
    mesh = zbpp.mesh(stages=1, data_parallel=2, tensor_parallel=2)
    how = {f"tables.{i}": RowwiseParallel(input_layouts=Replicate()) for i in range(2)}
    parallelize_module(layer, mesh["tp"], how)
    with (
        pytest.MonkeyPatch.context() as patch,
        zbpp.Pipeline(
            [layer],
            loss_fn=nn.functional.mse_loss,
            optimizer=None,
            schedule="1F1B",
            n_microbatches=1,
            mesh=mesh,
        ) as pipeline,
    ):
        if is_broken:
            patch.setattr(buckets, "place_gradients", lambda _: None)
        own = slice(pipeline.place.replica, pipeline.place.replica + 1)
        pipeline.step(words[own], target[own])
        pairs = zip(layer.parameters(), plain.parameters(), strict=True)
        return [torch.equal(whole(p.grad), other.grad) for p, other in pairs]


def test_replicas_sum_gradients_that_are_dealt_out_alike(pool: Pool) -> None:
    assert pool.run(read_tables, 4, False) == [[True, True]] * 4
    assert pool.run(read_tables, 4, True) != [[True, True]] * 4
