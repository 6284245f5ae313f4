"""Train a Qwen3-MoE of transformers with its experts sharded over processes.

torchrun --nproc-per-node 4 examples/qwen3_moe_experts.py README.md
python examples/qwen3_moe_experts.py README.md

The first line starts 2 stages x 2 processes that have half of the experts each. Both
have the same losses, up to rounding, and go on from each other's checkpoints.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import zbpp

# The layer, which is all that knows how tokens reach their experts.


class AllToAll(torch.autograd.Function):
    """Rows of a tensor go to other processes, their gradients come back."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, n_in: list[int], n_out: list[int], group: Any
    ) -> Tensor:
        """Send rows, as many to each process, and return what the others sent."""
        ctx.counts, ctx.group = (n_out, n_in), group
        received = rows.new_empty(sum(n_in), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), n_in, n_out, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradients the other way."""
        return AllToAll.apply(gradient, *ctx.counts, ctx.group), None, None, None


class DealtExperts(nn.Module):
    """The experts of a Qwen3-MoE or Mixtral layer, which `zbpp.deal` may deal out.

    Args:
        experts: all of them, under the same names.
        group: of processes along ``ep``; None: this process has all.
    """

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.group = group
        for name, p in experts.named_parameters():
            self.register_parameter(name, p)
        self.act_fn = experts.act_fn

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Outputs of (tokens, k) experts for (tokens, width), weighed and added up."""
        n_here = len(self.gate_up_proj)
        n = n_here if self.group is None else n_here * self.group.size()
        order = experts.flatten().argsort(stable=True)  # by expert, and so by process
        token_of = order // experts.shape[1]
        counts = experts.flatten().bincount(minlength=n).view(-1, n_here)
        rows, sources = tokens[token_of], counts
        n_out = n_in = counts.sum(1).tolist()
        if self.group is not None:
            sources = torch.empty_like(counts)  # rows by source and expert
            dist.all_to_all_single(sources, counts, group=self.group)
            n_in = sources.sum(1).tolist()
            rows = AllToAll.apply(rows, n_in, n_out, self.group)
        expert_of = torch.arange(n_here).repeat(len(sources))
        by_expert = expert_of.repeat_interleave(sources.flatten()).argsort(stable=True)
        parts = rows[by_expert].split(sources.sum(0).tolist())
        outputs = torch.cat([self._expert(i, part) for i, part in enumerate(parts)])
        rows = torch.zeros_like(outputs).index_copy(0, by_expert, outputs)
        if self.group is not None:
            rows = AllToAll.apply(rows, n_out, n_in, self.group)
        rows = rows * weights.flatten()[order, None].to(rows.dtype)
        return torch.zeros_like(tokens).index_add(0, token_of, rows)

    def _expert(self, i: int, rows: Tensor) -> Tensor:
        gate, up = functional.linear(rows, self.gate_up_proj[i]).chunk(2, dim=-1)
        return functional.linear(self.act_fn(gate) * up, self.down_proj[i])


# The script.


def main() -> None:
    """Train for some steps, and save."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("--mode", default="ZBH1")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh: Any = None
    if (n_ranks := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        mesh = zbpp.mesh(stages=args.stages, expert_parallel=n_ranks // args.stages)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=16,
        num_key_value_heads=2,
        moe_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config)
    for layer in model.model.layers:
        group = None if mesh is None else mesh.get_group("ep")
        layer.mlp.experts = DealtExperts(layer.mlp.experts, group)
        if mesh is not None:
            zbpp.deal(layer.mlp.experts, mesh["ep"])
    pipeline = zbpp.Pipeline(
        model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        schedule=args.mode,
        n_stages=args.stages,
        n_microbatches=4,
        clip_grad_norm=1.0,
        mesh=mesh,
    )
    if args.folder.exists():
        pipeline.load(args.folder)
    text = torch.tensor(list(args.text.read_bytes()))  # a token is a byte
    place = pipeline.place
    for step in range(pipeline.n_steps, args.steps):
        places = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - 64, (16,), generator=places)
        rows = torch.stack([text[start : start + 64] for start in starts.tolist()])
        rows = rows.chunk(place.n_replicas)[place.replica]  # others have other samples
        result = pipeline.step({"input_ids": rows, "labels": rows})
        if pipeline.rank == 0:
            print(
                f"step {step + 1}  loss {result.loss:.6f}  norm {result.grad_norm:.4f}"
            )
    pipeline.save(args.folder, wait=True)
    pipeline.close()


if __name__ == "__main__":
    main()
