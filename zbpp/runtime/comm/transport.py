"""The transport of values between stages: one interface, two implementations.

`zbpp.runtime.comm.local` serves stages that live in one process (notebooks, tests, one
GPU), `zbpp.runtime.comm.mailbox` one process per stage. Both hand over the same
tensors, hence the same bits.

What a method does here is right where one process holds all stages: there is nobody to
tell and nothing to wait for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from zbpp.core import Job, Message
from zbpp.runtime.comm.place import ALONE, Place
from zbpp.runtime.support.errors import PeerError
from zbpp.runtime.values import Tensors

__all__ = ["Expected", "Opening", "Reduction", "Transport"]


@dataclass(frozen=True)
class Opening:
    """A batch, as far as its messages are concerned.

    Args:
        n_microbatches: of the step.
        inputs: of its micro-batches, on the stage that reads them.
        n_filled: micro-batches that have samples, where inputs or targets are read;
            None: not known here.
        n_inputs: samples of the inputs, where they were cut here.
        n_targets: samples of the targets, where they were cut here.
    """

    n_microbatches: int
    inputs: Sequence[Tensors] | None = None
    n_inputs: int | None = None
    n_targets: int | None = None
    n_filled: int | None = None
    training: bool = True


class Reduction(Protocol):
    """A sum over all stages that is under way."""

    def ready(self) -> bool:
        """True if `result` returns without waiting for a stage of this process."""

    def done(self) -> bool:
        """True if `result` returns at once; asking waits for nothing."""

    def result(self, job: Job | None = None) -> Tensor:
        """Wait for the sum, on the host; ``job`` is named if it does not come."""


class Expected:
    """A value that was announced to a transport, and is to be received once."""

    def ready(self) -> bool:
        """True if `receive` returns without waiting for a stage of this process."""
        return True

    def receive(self, job: Job | str) -> Tensors:
        """Wait for the value; ``job`` is named if it does not come."""
        raise NotImplementedError


class Transport:
    """One stage's messages. Values of a channel arrive in the order of their sends."""

    doing: str = "the start"
    """The call that is under way, for the words of a failure: ``step 3``."""

    peers: Place = ALONE
    """The processes of the same stage."""

    is_local: bool = False
    """Values come from stages of this process, so that `Expected.ready` matters."""

    on_device: bool = False
    """A receive occupies the device until its value comes."""

    def begin(self, opening: Opening | None = None) -> int | None:
        """Start a step or an evaluation; without an opening it has no batch.

        Returns:
            Micro-batches that have samples; None: all of them.
        """
        return None if opening is None else opening.n_filled

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Hand over a value and go on at once."""
        raise NotImplementedError

    def post(self, value: Message, peer: int, like: Tensors | None = None) -> Expected:
        """Announce that a value will be received; its shapes are those of ``like``."""
        raise NotImplementedError

    def reduce(self, vector: Tensor) -> Reduction:
        """Start to sum a vector over all that step: a flat table of a `Place`."""
        raise NotImplementedError

    def sum_numbers(self, numbers: Tensor) -> Reduction:
        """Start to sum numbers of the host over all that step together."""
        raise NotImplementedError

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all that step together, by rank."""
        return [thing]

    def gather_pipeline(self, thing: Any) -> list[Any]:
        """Give every process the things of its pipeline, by stage; all must call."""
        return self.gather(thing)

    def message_bytes(self) -> dict[int, int]:
        """Sizes of the activations that steps send or receive here, by chunk."""
        return {}

    def end(self) -> None:
        """End the step: no message may be left to receive."""
        raise NotImplementedError

    def lost_peer(self, job: str, error: RuntimeError) -> PeerError:
        """The error for a collective of the stage's peers that has broken in a job."""
        return PeerError(f"a collective in {job} has failed: {error}")

    def report(self, error: BaseException, *, ends: bool = True) -> None:
        """Tell the other processes why this one stops, or cannot begin a step."""

    def flush(self) -> None:
        """Wait until all sends have left."""

    def let_go(self) -> None:
        """The pipeline was dropped: end without waiting long for other processes."""

    def close(self) -> None:
        """Give back what the transport holds."""
