"""Trainings on a mesh: `MeshCase`, a case with the model of `mesh_model`.

``plain(replace(case, kind="none"))`` has its numbers, `reference` its bits.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import torch
from case_models import Model
from cases import EVALUATED, Case
from mesh_model import WORDS, MeshModel
from torch import Tensor, nn
from torch.nn import functional

import zbpp

SAMPLES, TOKENS = 16, 8


@dataclass(frozen=True)
class Kind:
    """A mesh, and how its processes share the layers.

    Args:
        sizes: of the mesh, but for its stages.
        options: of `zbpp.DataParallel`.
        wrap: what wraps the layers before the pipeline has them.
    """

    sizes: dict[str, int] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    wrap: str = ""

    @property
    def sums(self) -> bool:
        """True if gradients of the layers without experts are summed over processes."""
        return bool(self.wrap) or any(
            n > 1 for name, n in self.sizes.items() if name != "tensor_parallel"
        )

    @property
    def n_peers(self) -> int:
        """Processes of a stage."""
        return prod(n for name, n in self.sizes.items() if name != "replicate")


DP, TP, CP, EP = ({f"{x}_parallel": 2} for x in ("data", "tensor", "context", "expert"))
KINDS = {
    "none": Kind(),
    "dp": Kind(DP),
    "optimizer": Kind(DP, {"shard": "optimizer"}),
    "gradients": Kind(DP, {"shard": "gradients"}),
    "parameters": Kind(DP, {"shard": "parameters"}),
    "buffers": Kind(DP, {"shard": "parameters", "alternating_buffers": True}),
    "replicate": Kind(DP, wrap="replicate"),
    "fsdp resharded": Kind(DP, wrap="resharded"),
    "fsdp in part": Kind(DP, wrap="part"),
    "fsdp of one": Kind(wrap="resharded"),
    "hsdp": Kind({"data_parallel": 4, "replicate": 2}, wrap="whole"),
    "tp": Kind(TP),
    "tp dp": Kind(DP | TP),
    "cp": Kind(CP),
    "ep": Kind(EP),
    "ep optimizer": Kind(EP, {"shard": "optimizer"}),
    "dp ep": Kind(DP | EP, {"shard": "parameters"}),
    "cp ep": Kind(CP | EP, {"shard": "gradients"}),
}


@dataclass(frozen=True, kw_only=True)
class MeshCase(Case):
    """A training on a mesh; some steps are clipped, and others are not.

    Args:
        kind: a name in `KINDS`.
        uses: parameters of replicas: ``"some"``, other ones than the others use;
            ``"no layer"``, one leaves out a layer; ``"none of one"``, none uses one.
        weights: ``"plain"``, ``"tied"`` or ``"frozen"``.
        numbers: ``"float64"``, ``"autocast"`` to bfloat16, or ``"narrow"``: computed in
            bfloat16 and summed in float32 by `fully_shard`.
        within: blocks are checkpointed.
        halfway: ``"resume"`` from a checkpoint of another mode, or one of
            ``"elsewhere"``, of two replicas.
    """

    kind: str
    uses: str = "some"
    weights: str = "plain"
    numbers: str = "float64"
    within: bool = False
    halfway: str = "nothing"
    mode: str = "ZBV"
    samples: int = SAMPLES
    weigh: str | None = "tokens"
    post_validation: bool | None = True

    n_evaluated = SAMPLES

    @property
    def n_ranks(self) -> int:
        """Processes of the mesh."""
        return self.n_stages * KINDS[self.kind].n_peers

    @property
    def of(self) -> Model:
        """The whole model."""
        return Model(lambda i: self.layers()[i], partial(batch, self.uses), loss_fn)

    @property
    def first_half(self) -> "MeshCase | None":
        """The case that takes the first steps, up to a checkpoint."""
        if self.halfway == "resume":
            return replace(self, mode="ZBH1")
        if self.halfway == "elsewhere":
            return replace(self, kind="dp", n_stages=self.n_ranks // 2)
        return None

    def share(self, pipeline: zbpp.Pipeline, *batch: Tensor) -> tuple[Tensor, ...]:
        """The samples and tokens of this process."""
        place = pipeline.place
        return tuple(
            x.chunk(place.n_replicas)[place.replica]
            .chunk(place.n_sequence_slices, 1)[place.sequence_slice]
            .clone()
            for x in batch
        )

    def place(self) -> dict[str, Any]:
        """The mesh and its options; without one, the stages are those of the ranks."""
        kind = KINDS[self.kind]
        if not kind.sizes and not kind.wrap:
            return {}
        mesh = zbpp.mesh(stages=self.n_stages, **kind.sizes)
        return {"mesh": zbpp.DataParallel(mesh=mesh, **kind.options)}

    def layers(self, mesh: Any = None) -> list[nn.Module]:
        """Layers with this process's part of their parameters."""
        mesh = None if mesh is None else mesh.mesh
        layers = self.model_on(mesh).layers()
        if KINDS[self.kind].wrap:
            _wrap(layers, self, mesh)
        return layers

    def model_on(self, mesh: Any) -> MeshModel:
        """The model on a mesh."""
        model = MeshModel(
            mesh,
            dtype=torch.float64 if self.numbers == "float64" else torch.float32,
            tied=self.weights == "tied",
            frozen=self.weights == "frozen",
            idle=self.uses == "none of one",
        )
        for block in model.blocks:
            block.checkpointed = self.within
        return model

    def predict(self, pipeline: zbpp.Pipeline) -> Tensor:
        """Outputs of all replicas and slices, on all ranks."""
        words, _ = self.share(pipeline, *self.batch(EVALUATED))
        place = pipeline.place
        here = place.replica, place.sequence_slice
        parts = dict(pipeline.gather((here, pipeline.predict(words, everywhere=True))))
        columns = [
            torch.cat([parts[i, j] for i in range(place.n_replicas)])
            for j in range(place.n_sequence_slices)
        ]
        return torch.cat(columns, 1)


def reference(case: MeshCase) -> MeshCase:
    """The case of the same mesh, numbers and checkpoint that has the same bits."""
    return replace(
        case,
        mode="1F1B",
        n_stages=2 if KINDS[case.kind].n_peers == 1 else 1,
        post_validation=False,
        buckets=False,
        recompute=None,
        within=False,
        switch=None,
        halfway="elsewhere" if case.halfway == "elsewhere" else "nothing",
    )


def batch(uses: str, step: int, _: int) -> tuple[Tensor, Tensor]:
    """Words, and words to predict for some: more at the ends of the sequences.

    Where many count, as in every second step, the gradient is small.
    """
    generator = torch.Generator().manual_seed(100 + step)
    draw = partial(torch.randint, generator=generator)
    x, y = draw(WORDS, (SAMPLES, TOKENS)), draw(WORDS, (SAMPLES, TOKENS))
    most = torch.arange(TOKENS) + (TOKENS if step % 2 else 0)
    counts = draw(2 * TOKENS, (SAMPLES, TOKENS)) <= most
    rows, columns = torch.arange(SAMPLES)[:, None], torch.arange(TOKENS)
    # words 4 and 5 are of the tables; the second replica, or slice, has none of 4
    second = (rows >= SAMPLES // 2) | (columns >= TOKENS // 2)
    x = torch.where(second & (x % 4 == 0), x + 2, x)
    x = torch.where(~second & (rows % 4 < 2) & (x % 4 == 1), x + 2, x)
    x[:, 0] = torch.where(second[:, 0], 5, 4)
    if uses == "no layer":
        x = torch.where(second & (x % 4 == 1), x + 2, x)
    return x, torch.where(counts, y, -100)


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    loss = functional.cross_entropy(outputs.flatten(0, 1).double(), targets.flatten())
    return 3.0 * loss


def _wrap(layers: list[nn.Module], case: MeshCase, mesh: Any) -> None:
    """Wrap the layers by functions of torch."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind, policy = KINDS[case.kind], MixedPrecisionPolicy()
    part = mesh["dp_replicate", "dp_shard"] if kind.n_peers == 4 else mesh["dp"]
    if case.numbers == "narrow":
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in layers:
        if kind.wrap == "replicate":
            replicate(layer, mesh=part, mp_policy=policy)
        elif kind.wrap == "part":
            for child in layer.children():
                if isinstance(child, nn.LayerNorm):
                    fully_shard(child, mesh=part, mp_policy=policy)
        else:
            fully_shard(
                layer,
                mesh=part,
                reshard_after_forward=kind.wrap == "resharded",
                mp_policy=policy,
            )
