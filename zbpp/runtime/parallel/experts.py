"""Parameters of which each process along ``ep`` holds its own: experts.

    expert_parameters=lambda name, p: ".experts." in name

    layers.3.router            equal on all processes    summed over dp x cp x ep
    layers.3.experts.up (ep 0) experts 0 .. E/2 - 1      summed over dp x cp
    layers.3.experts.up (ep 1) experts E/2 .. E - 1      summed over dp x cp

A parameter has one name on all processes: along its first dimension they hold parts of
one tensor, which is what a checkpoint holds. DTensors that are sharded on ``ep`` say so
themselves. What moves tokens to their experts is the layers' own.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.runtime.chunk import Chunk
from zbpp.runtime.comm.stage_group import EXPERT_DIM, StageGroup, single_dims
from zbpp.runtime.policies import IsExpert
from zbpp.runtime.support.fsdp import managed_dims, units_in
from zbpp.runtime.support.sharded import is_sharded, local_part

__all__ = [
    "ExpertNames",
    "check_experts",
    "kept_dims",
]


Parameters = frozenset[nn.Parameter]


@dataclass(frozen=True)
class ExpertNames:
    """The model's own names of parameters that are a process's own on ``ep``.

    Args:
        plain: those that the user has named.
        dtensors: those that are sharded on it.
    """

    plain: frozenset[str] = frozenset()
    dtensors: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        chunks: Iterable[Chunk],
        is_expert: IsExpert | None,
        tied: Collection[nn.Parameter],
    ) -> "ExpertNames":
        """Find them in the chunks of a stage, before zbpp wraps anything.

        Args:
            chunks: of a stage.
            is_expert: tells those that are no DTensors; None: there are none.
            tied: parameters that several layers hold.

        Raises:
            RequestError: one of them is tied.
        """
        plain, dtensors = set(), set()
        for chunk in chunks:
            dealt = {
                p: single_dims(dims)
                for layer in chunk.layers
                for unit in units_in(layer)
                for p, dims in managed_dims(unit)
            }
            for _, name, p in chunk.all_leaves():
                dims_of_part = local_part(p).names if is_sharded(p) else ()
                if EXPERT_DIM in dims_of_part and EXPERT_DIM not in dealt.get(p, ()):
                    dtensors.add(name)
                elif is_expert is not None and is_expert(name, p):
                    plain.add(name)
                else:
                    continue
                if p in tied:
                    raise RequestError(
                        f"{name} is an expert's, and several layers share it, some of "
                        "them on other stages; untie it"
                    )
        return cls(frozenset(plain), frozenset(dtensors))

    def find(self, chunks: Iterable[Chunk]) -> tuple[Parameters, Parameters]:
        """The parameters, as they are now: to wrap a layer changes them.

        Returns:
            Those that are plain or dealt out by `fully_shard` alone, and all.
        """
        plain, every = set[nn.Parameter](), set[nn.Parameter]()
        for chunk in chunks:
            for _, name, p in chunk.all_leaves():
                if name in self.plain:
                    plain.add(p)
                if name in self.plain or name in self.dtensors:
                    every.add(p)
        return frozenset(plain), frozenset(every)


def kept_dims(p: Tensor, experts: Collection[Tensor]) -> tuple[str, ...]:
    """Dimensions that a parameter's gradient is not summed over by zbpp.

    Experts are a process's own; a DTensor sums over those of its mesh by itself, as
    its gradient says whether it is whole or a summand.
    """
    names: Sequence[str] = ()
    if is_sharded(p):
        mesh = p.device_mesh  # type: ignore[attr-defined]
        names = mesh.mesh_dim_names or ()
    return (*names, *((EXPERT_DIM,) if p in experts else ()))


Shapes = Mapping[str, tuple[int, ...]]
"""Of a stage's plain experts, by name."""


def check_experts(
    every: Sequence[tuple[int, Shapes]], peers: StageGroup, *, named: bool
) -> None:
    """Compare the experts of all processes.

    Args:
        every: of each process, its stage and the shapes of its plain experts.
        peers: processes of the stage.
        named: there is a predicate that tells them.

    Raises:
        RequestError: it tells none, or they do not go together.
    """
    if named and not any(shapes for _, shapes in every):
        raise RequestError(
            "expert_parameters names no parameter of the model, so all would be summed "
            "over 'ep'; it is called with the model's own name of each parameter, as "
            "state_dict() has it, and the parameter"
        )
    first: dict[int, tuple[int, Shapes]] = {}
    for rank, (stage, shapes) in enumerate(every):
        at, expected = first.setdefault(stage, (rank, shapes))
        if shapes == expected:
            continue
        name = next(
            name
            for name in (*expected, *shapes)
            if expected.get(name) != shapes.get(name)
        )
        texts = [
            f"{table[name]} on rank {place}" if name in table else f"none on {place}"
            for place, table in ((at, expected), (rank, shapes))
        ]
        raise RequestError(
            f"{name}, one of expert_parameters, has the shape {' and '.join(texts)}; "
            f"the {len(peers.ranks)} processes of a stage must hold the same names and "
            "shapes: put the experts of a process into one tensor for each weight, "
            "along its first dimension, as many on each"
        )
