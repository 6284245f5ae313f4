"""The ties of one stage: gradients that are sent and added.

    backward   each layer with the parameter adds up one gradient
    send       a chunk's gradients, after its last W, to the other stages
    add        all layers' gradients, in layer order: each stage gets the same bits
    step       each process steps its copy; the norm counts the first layer's alone

A tied parameter that learns always has a gradient: layers that have not used it count
with zeros.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zbpp.core import RequestError, TiedGradient
from zbpp.runtime.support.sharded import as_sharded, own_shard, place_gradients
from zbpp.runtime.ties.plan import NO_TIES, TiePlan, numbers_of
from zbpp.runtime.values import Tensors


@dataclass
class TiedParameter:
    """A tied parameter on one stage.

    The parameter of the first layer of this process that has it is stepped.
    """

    parameter: nn.Parameter
    leaves: dict[int, nn.Parameter] = field(default_factory=dict)
    """Tensors that the stage's layers use and get gradients for, by layer."""
    places: list[tuple[nn.Module, str, nn.Parameter]] = field(default_factory=list)
    """Modules, the names of the leaves in them, and the leaves."""
    earlier_grad: Tensor | None = None
    """Gradient of an earlier step that has not been cleared."""

    @property
    def aliases(self) -> list[nn.Parameter]:
        """The leaves that share the memory of the stepped parameter."""
        return [leaf for leaf in self.leaves.values() if leaf is not self.parameter]

    @property
    def is_stepped(self) -> bool:
        """False where another stage of this process steps it."""
        return len(self.aliases) < len(self.leaves)


class StageTies:
    """The tied parameters that layers of one stage have, by tie."""

    def __init__(
        self,
        stage: int = 0,
        plan: TiePlan = NO_TIES,
        parameters: Mapping[int, TiedParameter] | None = None,
    ) -> None:
        self.plan = plan
        self.parameters = parameters or {}
        self.aliases: dict[nn.Parameter, nn.Parameter] = {
            alias: x.parameter for x in self.parameters.values() for alias in x.aliases
        }
        """Not to be stepped: they share the memory of parameters that are."""
        self.copies: set[Tensor] = {
            x.parameter
            for tie, x in self.parameters.items()
            if plan.stages(tie)[0] != stage
        }
        """Not to be counted in the norm: the stage of the first layer does so."""

    # The parameters.

    @torch.no_grad()
    def refresh(self) -> None:
        """Let aliases share the memory and the freezing of their parameters.

        Others may have replaced the one (``p.data = ..``) or changed the other.
        """
        for tied in self.parameters.values():
            for alias in tied.aliases:
                if numbers_of(alias) != numbers_of(tied.parameter):
                    alias.data = tied.parameter.data
                alias.requires_grad_(tied.parameter.requires_grad)

    def end(self) -> None:
        """Tie the layers to one parameter again."""
        for tied in self.parameters.values():
            for module, key, leaf in tied.places:
                if module._parameters.get(key) is leaf:
                    setattr(module, key, tied.parameter)

    # The gradients.

    def begin(self) -> None:
        """Put gradients aside that are there from before; backwards come next."""
        for tied in self.parameters.values():
            tied.earlier_grad = tied.parameter.grad if tied.is_stepped else None
            for leaf in tied.leaves.values():
                leaf.grad = None

    def gradients(self, message: TiedGradient) -> Tensors:
        """The gradients of one chunk's layers, in layer order; of DTensors the parts.

        Neighbours along ``tp`` on other stages have the same parts.
        """
        leaves = self.parameters[message.tie].leaves
        layers = self._layers(message)
        return tuple(self._gradient(message.tie, leaves[layer]) for layer in layers)

    def like(self, message: TiedGradient) -> Tensors:
        """Tensors that look like the gradients of another stage."""
        part = own_shard(self.parameters[message.tie].parameter.detach())
        return (part,) * len(self._layers(message))

    @torch.no_grad()
    def add(self, received: Mapping[TiedGradient, Sequence[Tensor]]) -> None:
        """Give each parameter that is stepped here the sum of its layers' gradients."""
        for number, tied in self.parameters.items():
            if tied.is_stepped and tied.parameter.requires_grad:
                first, *others = self._summands(number, received)
                # what is sent may still be under way, so it is not added to
                total = first.clone() if len(self.plan.stages(number)) > 1 else first
                for summand in others:
                    total.add_(summand)
                total = as_sharded(total, tied.parameter)
                if tied.earlier_grad is not None:
                    total = tied.earlier_grad.add_(total)
                tied.parameter.grad = total
            tied.earlier_grad = None
            for alias in tied.aliases:
                alias.grad = None

    def _summands(
        self, number: int, received: Mapping[TiedGradient, Sequence[Tensor]]
    ) -> Iterator[Tensor]:
        for chunk in self.plan.chunks[number]:
            message = TiedGradient(number, chunk)
            yield from received.get(message) or self.gradients(message)

    def _layers(self, message: TiedGradient) -> list[int]:
        """Layers of a chunk with a tied parameter; none if it needs no gradient."""
        if not self.parameters[message.tie].parameter.requires_grad:
            return []
        layers = self.plan.ranges[message.chunk]
        return [layer for layer, _ in self.plan.ties[message.tie] if layer in layers]

    def _gradient(self, number: int, leaf: nn.Parameter) -> Tensor:
        place_gradients([leaf])
        gradient: Tensor | None = own_shard(leaf.grad)
        if gradient is None:
            return torch.zeros_like(own_shard(leaf), requires_grad=False)
        if gradient.layout is not torch.strided:
            raise RequestError(
                f"the tied parameter {self.plan.name(number)} has a sparse gradient, "
                "and these are not added between layers; build the embedding with "
                "sparse=False"
            )
        return gradient
