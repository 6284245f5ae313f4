"""The ties of one stage: gradients that are sent and added, copies that are compared.

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
from zbpp.runtime.comm.transport import Transport
from zbpp.runtime.support.fingerprint import bits
from zbpp.runtime.support.marks import Mark, mark
from zbpp.runtime.ties.plan import NO_TIES, TiePlan
from zbpp.runtime.values import Tensors

__all__ = ["HeldTie", "Source", "StageTies"]

_MODULUS = 2**52
"""Numbers below it are exact in float64."""


@dataclass
class Source:
    """The parameter in the model, where other stages of this process hold copies."""

    parameter: nn.Parameter
    seen: Mark = None
    """After the last write that was a step's own."""


@dataclass
class HeldTie:
    """A tied parameter on one stage.

    Args:
        number: of the tie.
        own: the stage's copy, which its optimizer steps.
        leaves: what its layers use and get gradients for, by layer.
        source: what ``own`` is a copy of in this process; its own if it is none.
    """

    number: int
    own: nn.Parameter
    leaves: dict[int, nn.Parameter]
    source: Source
    kept: Tensor | None = None


class StageTies:
    """The tied parameters of one stage.

    Args:
        stage: its number.
        plan: of the whole model.
        held: the stage's own.
    """

    def __init__(
        self, stage: int = 0, plan: TiePlan = NO_TIES, held: Sequence[HeldTie] = ()
    ) -> None:
        self.stage = stage
        self.plan = plan
        self._posted: list[TiedGradient] = []
        self.held = {one.number: one for one in held}
        self.aliases: set[Tensor] = {
            leaf for one in held for leaf in one.leaves.values() if leaf is not one.own
        }
        """Not to be stepped: they share the memory of parameters that are."""
        self.copies: set[Tensor] = {
            one.own for one in held if plan.stages(one.number)[0] != stage
        }
        """Not to be counted: the stage of the first layer does."""

    # The parameters.

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over what others have written to the model's own parameter."""
        for one in self.held.values():
            source = one.source
            if one.own is source.parameter:
                continue
            if one.own.requires_grad != source.parameter.requires_grad:
                one.own.requires_grad_(source.parameter.requires_grad)
            if mark(source.parameter) != source.seen:
                one.own.copy_(source.parameter)

    def unseen_copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Copies that are in no layer, each with the parameter that is."""
        for one in self.held.values():
            if one.own is not one.source.parameter:
                yield one.own, one.source.parameter

    def note_write(self) -> None:
        """A step has written to this stage's parameters, as others do to theirs."""
        for one in self.held.values():
            if one.own is one.source.parameter:
                one.source.seen = mark(one.own)

    def fingerprints(self) -> dict[int, Tensor]:
        """A number for each copy's bits, by its slot of the plan."""
        return {
            self.plan.slots[number, self.stage]: _fingerprint(one.own)
            for number, one in self.held.items()
            if (number, self.stage) in self.plan.slots
        }

    def difference(self, fingerprints: Tensor) -> RequestError | None:
        """Compare the copies of all stages by their fingerprints."""
        text = self.plan.compare(fingerprints.tolist())
        return None if text is None else RequestError(text)

    # The gradients.

    def begin(self) -> None:
        """Before the backwards: put gradients aside that are there from before."""
        for one in self.held.values():
            is_models = one.own is one.source.parameter
            one.kept = one.own.grad if is_models else None
            for leaf in one.leaves.values():
                leaf.grad = None

    def send(self, message: TiedGradient, transport: Transport, peer: int) -> None:
        """Hand over the gradients of one chunk's layers.

        Raises:
            RequestError: one is sparse.
        """
        transport.send(message, self.outgoing(message), peer)

    def post(self, message: TiedGradient, transport: Transport, peer: int) -> None:
        """Announce gradients of another stage; they look like the parameter here."""
        own = self.held[message.tie].own
        n_tensors = len(self._layers(message)) if own.requires_grad else 0
        transport.post(message, peer, (own.detach(),) * n_tensors)
        self._posted.append(message)

    def ready(self, transport: Transport) -> bool:
        """True if `receive` returns without waiting for a stage of this process."""
        return all(map(transport.ready, self._posted))

    def receive(self, transport: Transport, job: Job) -> dict[TiedGradient, Tensors]:
        """Wait for all that is posted; ``job`` is named if it does not come."""
        posted, self._posted = self._posted, []
        return {message: transport.receive(message, job) for message in posted}

    def outgoing(self, message: TiedGradient) -> tuple[Tensor, ...]:
        """The gradients of one chunk's layers, in layer order.

        Raises:
            RequestError: one is sparse.
        """
        one = self.held[message.tie]
        if not one.own.requires_grad:
            return ()
        leaves = (one.leaves[layer] for layer in self._layers(message))
        return tuple(self._gradient(message.tie, leaf) for leaf in leaves)

    @torch.no_grad()
    def add(self, received: Mapping[TiedGradient, Sequence[Tensor]]) -> None:
        """Give each tied parameter the sum of its layers' gradients.

        Args:
            received: what the other stages have sent.

        Raises:
            RequestError: a gradient is sparse.
        """
        for number, one in self.held.items():
            if one.own.requires_grad:
                parts = list(self._parts(number, received))
                # what is sent may still be under way, so it is not added to
                total = parts[0].clone() if len(self._stages(number)) > 1 else parts[0]
                for part in parts[1:]:
                    total.add_(part)
                one.own.grad = total if one.kept is None else one.kept.add_(total)
            one.kept = None
            for leaf in one.leaves.values():
                if leaf is not one.own:
                    leaf.grad = None

    def _parts(
        self, number: int, received: Mapping[TiedGradient, Sequence[Tensor]]
    ) -> Iterator[Tensor]:
        for chunk in self.plan.chunks[number]:
            message = TiedGradient(number, chunk)
            yield from received.get(message) or self.outgoing(message)

    def _layers(self, message: TiedGradient) -> list[int]:
        layers = self.plan.ranges[message.chunk]
        return [layer for layer, _ in self.plan.ties[message.tie] if layer in layers]

    def _stages(self, number: int) -> tuple[int, ...]:
        return self.plan.stages(number)

    def _gradient(self, number: int, leaf: nn.Parameter) -> Tensor:
        gradient = leaf.grad
        if gradient is None:
            return torch.zeros_like(leaf, requires_grad=False)
        if gradient.layout is not torch.strided:
            raise RequestError(
                f"the tied parameter {self.plan.name(number)} has a sparse gradient, "
                "and these are not added between layers; build the embedding with "
                "sparse=False"
            )
        return gradient


def _fingerprint(parameter: Tensor) -> Tensor:
    """The sum of a tensor's bits as integers, exact in float64, on its device."""
    total = bits(parameter).sum(dtype=torch.int64)
    return torch.remainder(total, _MODULUS).double()
