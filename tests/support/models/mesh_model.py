"""A model with a layer for each way in which processes of a mesh may differ.

The first number of a hidden state is the word, which no layer changes: words decide
which experts and which tables a layer uses, so that no rounding can.
"""

from typing import Any

import torch
import torch.distributed as dist
from qwen3_moe_experts import DealtExperts  # the example
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zbpp

WORDS, WIDTH, N_EXPERTS = 16, 8, 4


class Table(nn.Module):
    """Words and their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.embedding(words)
        return torch.cat([words[..., None].to(rows.dtype), rows], -1)


class Block(nn.Module):
    """Adds something to the hidden states, which may be computed in a checkpoint."""

    checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        words, hidden = x[..., 0].long(), x[..., 1:]
        if self.checkpointed:
            more = checkpoint(self.more, hidden, words, use_reentrant=False)
        else:
            more = self.more(hidden, words)
        return torch.cat([x[..., :1], hidden + more], -1)


class AllSlices(torch.autograd.Function):
    """Slices of a sequence, (samples, tokens, width), joined over a group."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(mine) for _ in range(group.size())]
        dist.all_gather(parts, mine.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 1)[ctx.group.rank()], None


class Attention(Block):
    """Attention to the whole sequence, of which other processes may have slices."""

    def __init__(self, slices: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.slices = slices

    def more(self, hidden: Tensor, _: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(hidden)).chunk(3, -1)
        if self.slices is not None:
            k, v = (AllSlices.apply(x, self.slices) for x in (k, v))
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


class Dense(Block):
    """Two Linears, a convolution, parameters of odd sizes and a product of two."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.queries = nn.Parameter(torch.randn(3, WIDTH))
        self.key = nn.Linear(WIDTH, WIDTH, bias=False)
        self.convolution = nn.Conv1d(1, 2, 3, padding=1)

    def more(self, hidden: Tensor, _: Tensor) -> Tensor:
        x = self.norm(hidden)
        scores = (x @ self.key(self.queries).mT).softmax(-1)
        rows = self.convolution(x.flatten(0, 1)[:, None]).sum(1).view_as(x)
        more = self.gain * self.down(functional.gelu(self.up(x)))
        return more + scores @ self.queries + rows * x


class Lazy(Block):
    """Tables and Linears of which a micro-batch leaves out those without words."""

    def __init__(self, *, idle: bool) -> None:
        super().__init__()
        self.kinds = (0, 1, N_EXPERTS) if idle else (0, 1)  # no word is of the third
        self.tables = nn.ModuleList(nn.Embedding(WORDS, WIDTH) for _ in self.kinds)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in self.kinds)

    def forward(self, x: Tensor) -> Tensor:
        used = torch.isin(x[..., 0] % N_EXPERTS, torch.tensor(self.kinds).to(x))
        return super().forward(x) if used.any() else x.clone()

    def more(self, hidden: Tensor, words: Tensor) -> Tensor:
        total = torch.zeros_like(hidden)
        for kind, table, linear in zip(
            self.kinds, self.tables, self.linears, strict=True
        ):
            mask = words % N_EXPERTS == kind
            if mask.any():
                total = total + linear((hidden + table(words)).tanh()) * mask[..., None]
        return total


class Weights(nn.Module):
    """The weights of all experts of a layer, as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(N_EXPERTS, 2 * WIDTH, WIDTH) / 2)
        self.down_proj = nn.Parameter(torch.randn(N_EXPERTS, WIDTH, WIDTH) / 2)
        self.act_fn = nn.SiLU()


class Routed(Block):
    """Two of the experts for each token."""

    def __init__(self, experts: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, N_EXPERTS, bias=False)
        self.experts = DealtExperts(Weights(), experts)

    def more(self, hidden: Tensor, words: Tensor) -> Tensor:
        rows, words = self.norm(hidden).flatten(0, 1), words.flatten()
        first = words % N_EXPERTS
        second = (first + 1 + words // N_EXPERTS % (N_EXPERTS - 1)) % N_EXPERTS
        chosen = torch.stack([first, second], -1)
        weights = self.router(rows).softmax(-1).gather(-1, chosen)
        with torch.autocast("cpu", enabled=False):  # the example knows of none
            outputs = self.experts(rows.to(hidden), chosen, weights.to(hidden))
        return outputs.view_as(hidden)


class Head(nn.Module):
    """A score for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x[..., 1:]))


class MeshModel(nn.Module):
    """All of them, the same on every process but for its experts.

    Args:
        mesh: of the processes; None: this one is alone.
        dtype: of parameters.
        tied: the head has the embedding's weight.
        frozen: a layer, and parameters of others, learn nothing.
        idle: some parameters are used by no word at all.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        tied: bool = False,
        frozen: bool = False,
        idle: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = Table()
        slices, experts = _group(mesh, "cp"), _group(mesh, "ep")
        self.blocks = nn.ModuleList(
            [
                Attention(slices),
                Dense(),
                Lazy(idle=idle),
                Routed(experts),
                Dense(),
            ]
        )
        self.head = Head()
        self.to(dtype)
        if tied:
            self.head.linear.weight = self.table.embedding.weight
        if frozen:
            for part in (self.blocks[1].up, self.blocks[3].router, self.blocks[4]):
                part.requires_grad_(False)
        if _group(mesh, "tp") is not None:
            for block in self.blocks:
                share_linears(block, mesh["tp"])
        if experts is not None:
            zbpp.deal(self.blocks[3].experts, mesh["ep"])

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def layers(self) -> list[nn.Module]:
        return [self.table, *self.blocks, self.head]


def share_linears(block: nn.Module, mesh: DeviceMesh) -> None:
    """Share Linears and tables of a layer between the processes of a mesh."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan: dict[str, Any] = {}
    if isinstance(block, Dense):
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if isinstance(block, Lazy):
        rows = RowwiseParallel(input_layouts=Replicate())
        plan = {f"tables.{i}": rows for i in range(len(block.tables))}
    if plan:
        parallelize_module(block, mesh, plan)


def _group(mesh: DeviceMesh | None, dim: str) -> dist.ProcessGroup | None:
    """The group of this process along a dimension; None: it is alone there."""
    names = mesh.mesh_dim_names or () if mesh is not None else ()
    if mesh is None or dim not in names or mesh[dim].size() == 1:
        return None
    return mesh.get_group(dim)
