"""Carry values between stages: one small interface, two implementations.

`LocalTransport` serves stages that live in one process (notebooks, tests, one GPU);
`zbpp.runtime.comm.distributed.DistributedTransport` serves one process per stage. Both
hand over the same tensors, hence the same bits.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from zbpp.core import Job, Message
from zbpp.runtime.comm.peers import ALONE, Peers
from zbpp.runtime.comm.ping import Ping
from zbpp.runtime.support.background import BackgroundWork
from zbpp.runtime.support.errors import PeerError
from zbpp.runtime.support.streams import Event, HostCopy, StageStream
from zbpp.runtime.values import Tensors

__all__ = ["LocalHub", "LocalTransport", "Opening", "Reduction", "Transport"]


@dataclass(frozen=True)
class Opening:
    """A step's batch, as far as its messages are concerned.

    Args:
        n_microbatches: of the step.
        inputs: of its micro-batches, on the stage that reads them.
        n_inputs: samples of the inputs, where they were cut here.
        n_targets: samples of the targets, where they were cut here.
    """

    n_microbatches: int
    inputs: Sequence[Tensors] | None = None
    n_inputs: int | None = None
    n_targets: int | None = None


class Reduction(Protocol):
    """A sum over all stages that is under way."""

    def ready(self) -> bool:
        """True if `result` returns without waiting for a stage of this process."""

    def done(self) -> bool:
        """True if `result` returns at once; asking waits for nothing."""

    def result(self, job: Job | None = None) -> Tensor:
        """Wait for the sum, on the host; ``job`` is named if it does not come."""


class Transport(Protocol):
    """One stage's messages. Values of a channel arrive in the order of their sends."""

    background: BackgroundWork
    """Work that the stage can do while it waits for a value."""

    doing: str
    """The call that is under way, for the words of a failure: ``step 3``."""

    peers: Peers
    """The processes of the same stage."""

    is_local: bool
    """Values come from stages of this process, so that `ready` has to be asked."""

    @property
    def on_device(self) -> bool:
        """True if a receive occupies the device until its value comes."""

    def begin(self, opening: Opening | None = None) -> None:
        """Start a step, or an evaluation if there is no opening."""

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Hand over a value and go on at once."""

    def post(self, value: Message, peer: int, like: Tensors | None = None) -> None:
        """Announce that a value will be received; its shapes are those of ``like``."""

    def ready(self, value: Message) -> bool:
        """True if `receive` returns without waiting for a stage of this process."""

    def receive(self, value: Message, job: Job) -> Tensors:
        """Wait for a value that was posted; ``job`` is named if it does not come."""

    def reduce(self, vector: Tensor) -> Reduction:
        """Start to sum a vector over all that step: a table of rows, flat (`Peers`)."""

    def add_over_replicas(self, numbers: Tensor) -> Reduction | None:
        """Start to sum numbers of the host over replicas; None: there is one."""

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all that step together, by rank."""

    def gather_pipeline(self, thing: Any) -> list[Any]:
        """The same, of the processes of this pipeline, by stage; all must call."""

    def ping(self, peer: int, n_bytes: int, rounds: int) -> list[Ping]:
        """Time messages between two steps; the stage with the lower number learns."""

    def message_bytes(self) -> dict[int, int]:
        """Sizes of the activations that steps send or receive here, by chunk."""

    def end(self) -> None:
        """End the step: no message may be left to receive."""

    def lost_peer(self, job: str, error: RuntimeError) -> PeerError:
        """The error for a collective of the stage's peers that has broken in a job."""

    def report(self, error: BaseException, *, ends: bool = True) -> None:
        """Tell the other processes why this one stops, or cannot begin a step."""

    def flush(self) -> None:
        """Wait until all sends have left."""

    def let_go(self) -> None:
        """The pipeline was dropped: end without waiting for other processes."""

    def close(self) -> None:
        """Give back what the transport holds."""


@dataclass
class LocalHub:
    """Mailbox and sums under way, shared by the stages of one process."""

    n_stages: int
    mail: dict[Message, deque[tuple[Tensors, Event | None]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    sums: list["_LocalSum"] = field(default_factory=list)
    n_ended: int = 0

    def transports(
        self, make_stream: Callable[[], StageStream] | None = None
    ) -> list["LocalTransport"]:
        """Make one transport per stage.

        Args:
            make_stream: makes the stream of each; None: all use the caller's.
        """
        return [
            LocalTransport(self, None if make_stream is None else make_stream())
            for _ in range(self.n_stages)
        ]


class _LocalSum:
    """Added up on the host, where every stage's vector goes when it is there.

    So no stage's stream waits for another's, nor for the forwards before a V.
    """

    def __init__(self, n_stages: int) -> None:
        self._n_stages = n_stages
        self._vectors: list[HostCopy] = []
        self._total: Tensor | None = None

    def add(self, vector: Tensor) -> None:
        self._vectors.append(HostCopy(vector))

    def ready(self) -> bool:
        return len(self._vectors) == self._n_stages

    def done(self) -> bool:
        return self.ready() and all(vector.done() for vector in self._vectors)

    def result(self, job: Job | None = None) -> Tensor:
        assert self.ready(), f"{job}: a stage is missing"
        if self._total is None:
            first, *others = (vector.read() for vector in self._vectors)
            for vector in others:
                first = first + vector
            self._total = first
        return self._total


class LocalTransport:
    """All stages in this process: the hub's mailbox is the only channel."""

    is_local = True
    on_device = False

    def __init__(self, hub: LocalHub, stream: StageStream | None = None) -> None:
        self.peers = ALONE
        self._hub = hub
        self.stream = stream
        """Of the stage, where each one has its own."""
        self.background = BackgroundWork()
        self.doing = "the start"
        self._n_sums = 0

    def begin(self, opening: Opening | None = None) -> None:
        """Nothing to prepare."""

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Put the tensors into the mailbox, behind an older copy if there is one."""
        event = None if self.stream is None else self.stream.mark()
        self._hub.mail[value].append((tensors, event))

    def post(self, value: Message, peer: int, like: Tensors | None = None) -> None:
        """Nothing to prepare."""

    def ready(self, value: Message) -> bool:
        """True if the value is in the mailbox."""
        return value in self._hub.mail

    def receive(self, value: Message, job: Job) -> Tensors:
        """Take the tensors out of the mailbox."""
        copies = self._hub.mail[value]
        tensors, event = copies.popleft()
        if not copies:
            del self._hub.mail[value]
        if self.stream is not None and event is not None:
            self.stream.take_over(tensors, event)
        return tensors

    def reduce(self, vector: Tensor) -> _LocalSum:
        """Add to this process's n-th sum, n being this stage's count so far."""
        sums, n_stages = self._hub.sums, self._hub.n_stages
        if self._n_sums == len(sums):
            sums.append(_LocalSum(n_stages))
        pending = sums[self._n_sums]
        self._n_sums += 1
        pending.add(vector)
        return pending

    def add_over_replicas(self, numbers: Tensor) -> None:
        """There is one replica."""

    def gather(self, thing: Any) -> list[Any]:
        """There is only this process."""
        return [thing]

    gather_pipeline = gather

    def ping(self, peer: int, n_bytes: int, rounds: int) -> list[Ping]:
        """Nothing travels."""
        return []

    def message_bytes(self) -> dict[int, int]:
        """Nothing travels."""
        return {}

    def end(self) -> None:
        """The last stage to end finds the mailbox empty, and clears the sums."""
        hub = self._hub
        self._n_sums = 0
        hub.n_ended += 1
        if hub.n_ended == hub.n_stages:
            assert not hub.mail, f"never received: {list(hub.mail)}"
            hub.sums.clear()
            hub.n_ended = 0

    def lost_peer(self, job: str, error: RuntimeError) -> PeerError:
        """Its layers may have collectives of their own."""
        return PeerError(f"a collective in {job} has failed: {error}")

    def report(self, error: BaseException, *, ends: bool = True) -> None:
        """Nobody else is to be told."""

    def flush(self) -> None:
        """Nothing to wait for: a message has left when it is sent."""

    def let_go(self) -> None:
        """Nothing to give back."""

    def close(self) -> None:
        """Nothing to give back."""
