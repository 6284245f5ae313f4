"""The ties of one stage: gradients that are sent and added.

    backward   each layer that holds the parameter adds up a gradient of its own
    send       a chunk's own, after its last W, to the other stages that hold it
    add        all layers' gradients, in layer order: each stage gets the same bits
    step       each stage steps its copy; the norm counts the first layer's alone

A tied parameter that learns always has a gradient: layers that have not used it count
with zeros.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zbpp.core import Job, RequestError, TiedGradient
from zbpp.runtime.comm.transport import Expected, Transport
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.support.sharded import as_sharded, own_shard, place_gradients
from zbpp.runtime.ties.plan import NO_TIES, TiePlan
from zbpp.runtime.values import Tensors

__all__ = ["HeldTie", "Source", "StageTies"]


@dataclass
class Source:
    """The parameter that layers of this process hold; several stages may copy it."""

    parameter: nn.Parameter
    seen: Mark = None
    """After the last write by a step of this process."""


@dataclass
class HeldTie:
    """A tied parameter on one stage.

    Args:
        number: of the tie.
        parameter: the stage's copy, which its optimizer steps.
        leaves: what its layers use and get gradients for, by layer.
        source: what the layers hold; ``parameter`` itself on one stage of a process.
        kept_grad: gradient of an earlier step that nobody has cleared.
    """

    number: int
    parameter: nn.Parameter
    leaves: dict[int, nn.Parameter]
    source: Source
    kept_grad: Tensor | None = None

    @property
    def is_in_layers(self) -> bool:
        """True if the stage's copy is what the layers hold."""
        return self.parameter is self.source.parameter


class StageTies:
    """The tied parameters of one stage.

    Args:
        stage: its number.
        plan: of the whole model.
        held: the tied parameters that layers of the stage hold.
    """

    def __init__(
        self, stage: int = 0, plan: TiePlan = NO_TIES, held: Sequence[HeldTie] = ()
    ) -> None:
        self.stage = stage
        self.plan = plan
        self._expected: dict[TiedGradient, Expected] = {}
        self.held = {tie.number: tie for tie in held}
        self.aliases: set[Tensor] = {
            leaf
            for tie in held
            for leaf in tie.leaves.values()
            if leaf is not tie.parameter
        }
        """Not to be stepped: they share the memory of parameters that are."""
        self.copies: set[Tensor] = {
            tie.parameter for tie in held if plan.stages(tie.number)[0] != stage
        }
        """Not to be counted in the norm: the stage of the first layer does so."""

    # The parameters.

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what others have written to the parameter in the layers."""
        for tie in self.held.values():
            source = tie.source.parameter
            if tie.is_in_layers:
                continue
            if tie.parameter.requires_grad != source.requires_grad:
                tie.parameter.requires_grad_(source.requires_grad)
            if mark(source) != tie.source.seen:
                tie.parameter.copy_(source)

    def unseen_copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Copies that are in no layer, each with the parameter that is."""
        for tie in self.held.values():
            if not tie.is_in_layers:
                yield tie.parameter, tie.source.parameter

    def note_write(self) -> None:
        """A step has written to this stage's parameters, as others do to theirs."""
        for tie in self.held.values():
            if tie.is_in_layers:
                tie.source.seen = mark(tie.parameter)

    # The gradients.

    def begin(self) -> None:
        """Put gradients aside that are there from before; backwards come next."""
        for tie in self.held.values():
            tie.kept_grad = tie.parameter.grad if tie.is_in_layers else None
            for leaf in tie.leaves.values():
                leaf.grad = None

    def send(self, message: TiedGradient, transport: Transport, peer: int) -> None:
        """Hand over the gradients of one chunk's layers.

        Raises:
            RequestError: one of them is sparse.
        """
        transport.send(message, self._gradients(message), peer)

    def post(self, message: TiedGradient, transport: Transport, peer: int) -> None:
        """Announce gradients of another stage; they look like the parameter here."""
        parameter = self.held[message.tie].parameter
        n_tensors = len(self._layers(message)) if parameter.requires_grad else 0
        like = (own_shard(parameter.detach()),) * n_tensors
        self._expected[message] = transport.post(message, peer, like)

    def ready(self) -> bool:
        """True if `receive` returns without waiting for a stage of this process."""
        return all(expected.ready() for expected in self._expected.values())

    def receive(self, job: Job) -> dict[TiedGradient, Tensors]:
        """Wait for all that is posted; ``job`` is named if it does not come."""
        expected, self._expected = self._expected, {}
        return {message: x.receive(job) for message, x in expected.items()}

    @torch.no_grad()
    def add(self, received: Mapping[TiedGradient, Sequence[Tensor]]) -> None:
        """Give each tied parameter the sum of its layers' gradients.

        Args:
            received: from the other stages.

        Raises:
            RequestError: a gradient is sparse.
        """
        for number, tie in self.held.items():
            if tie.parameter.requires_grad:
                first, *others = self._summands(number, received)
                # what is sent may still be under way, so it is not added to
                total = first.clone() if len(self.plan.stages(number)) > 1 else first
                for summand in others:
                    total.add_(summand)
                total = as_sharded(total, tie.parameter)
                if tie.kept_grad is not None:
                    total = tie.kept_grad.add_(total)
                tie.parameter.grad = total
            tie.kept_grad = None
            for leaf in tie.leaves.values():
                if leaf is not tie.parameter:
                    leaf.grad = None

    def _summands(
        self, number: int, received: Mapping[TiedGradient, Sequence[Tensor]]
    ) -> Iterator[Tensor]:
        for chunk in self.plan.chunks[number]:
            message = TiedGradient(number, chunk)
            yield from received.get(message) or self._gradients(message)

    def _gradients(self, message: TiedGradient) -> tuple[Tensor, ...]:
        """The gradients of one chunk's layers, in layer order; of DTensors the parts.

        Neighbours along ``tp`` on other stages have the same parts.
        """
        tie = self.held[message.tie]
        if not tie.parameter.requires_grad:
            return ()
        leaves = (tie.leaves[layer] for layer in self._layers(message))
        return tuple(self._gradient(message.tie, leaf) for leaf in leaves)

    def _layers(self, message: TiedGradient) -> list[int]:
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
