"""The transport of values between stages: one interface, two implementations.

    LocalMailbox   stages that live in one process (notebooks, tests, one GPU)
    Mailbox        one process per stage: `zbpp.runtime.comm.mailbox`

    stage 0   send A0.0 ---> | hub | ---> receive A0.0   stage 1

Both carry the same tensors, hence the same bits.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from zbpp.core import Job, Message
from zbpp.runtime.comm.place import ALONE, Place
from zbpp.runtime.microbatches import MicroBatches
from zbpp.runtime.support.errors import PeerError
from zbpp.runtime.support.streams import HostCopy
from zbpp.runtime.values import Tensors


class Reduction:
    """A sum over all stages that is under way."""

    def ready(self) -> bool:
        """True if `result` returns without waiting for a stage of this process."""
        return True

    def done(self) -> bool:
        """True if `result` returns at once; asking waits for nothing."""
        raise NotImplementedError

    def result(self, job: Job | None = None) -> Tensor:
        """Wait for the sum, on the host; ``job`` is named if it does not come."""
        raise NotImplementedError


class Expected:
    """A value that was announced to a transport, and is to be received once."""

    def ready(self) -> bool:
        """True if `receive` returns without waiting for a stage of this process."""
        return True

    def receive(self, job: Job | str) -> Tensors:
        """Wait for the value; ``job`` is named if it does not come."""
        raise NotImplementedError


class Transport:
    """One stage's messages. Values of a channel arrive in the order of their sends.

    The methods with a body are right where one process has all stages.
    """

    doing: str = "the start"
    """The call that is under way, for the words of a failure: ``step 3``."""

    peers: Place = ALONE
    """The processes of the same stage."""

    is_local: bool = False
    """Values come from stages of this process, so that `Expected.ready` matters."""

    on_device: bool = False
    """A receive occupies the device until its value comes."""

    def begin(self, batch: MicroBatches | None = None) -> None:
        """Start a step or an evaluation; without a batch, its shapes are known."""

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Start to send a value, and return at once."""
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
        """Give every process the picklable things of all that step, by rank."""
        return [thing]

    def gather_pipeline(self, thing: Any) -> list[Any]:
        """Give every process the things of its pipeline, by stage; all must call."""
        things = self.gather(thing)
        return [things[rank] for rank in self.peers.pipeline]

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

    def abandon(self) -> None:
        """The pipeline was dropped: end without waiting long for other processes."""

    def close(self) -> None:
        """End the process groups."""


@dataclass
class LocalHub:
    """Values and sums under way, shared by the stages of one process."""

    n_stages: int
    mail: dict[Message, deque[Tensors]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    sums: list["_LocalSum"] = field(default_factory=list)
    n_ended: int = 0

    def transports(self) -> list["LocalMailbox"]:
        """Make one transport per stage."""
        return [LocalMailbox(self) for _ in range(self.n_stages)]


class LocalMailbox(Transport):
    """The messages of one of several stages that share a process and a hub."""

    is_local = True

    def __init__(self, hub: LocalHub) -> None:
        self._hub = hub
        self._n_sums = 0

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Put the tensors into the hub, behind an older copy if there is one."""
        self._hub.mail[value].append(tensors)

    def post(self, value: Message, peer: int, like: Tensors | None = None) -> Expected:
        """Name a value that will be in the hub."""
        return _InHub(self._hub.mail, value)

    def reduce(self, vector: Tensor) -> Reduction:
        """Add to this process's n-th sum, n being this stage's count so far."""
        sums = self._hub.sums
        if self._n_sums == len(sums):
            sums.append(_LocalSum(self._hub.n_stages))
        pending = sums[self._n_sums]
        self._n_sums += 1
        pending.vectors.append(HostCopy(vector))
        return pending

    def end(self) -> None:
        """The last stage to end finds the hub empty, and clears the sums."""
        hub = self._hub
        self._n_sums = 0
        hub.n_ended += 1
        if hub.n_ended == hub.n_stages:
            if hub.mail:
                raise RuntimeError(f"never received: {', '.join(map(str, hub.mail))}")
            hub.sums.clear()
            hub.n_ended = 0


@dataclass(slots=True, eq=False)
class _InHub(Expected):
    """A value that a stage of this process will send."""

    mail: dict[Message, deque[Tensors]]
    value: Message

    def ready(self) -> bool:
        return self.value in self.mail

    def receive(self, job: Job | str) -> Tensors:
        copies = self.mail[self.value]
        tensors = copies.popleft()
        if not copies:
            del self.mail[self.value]
        return tensors


class _LocalSum(Reduction):
    """Added up on the host, where the vector of every stage is copied to.

    So no V waits for the forwards before it.
    """

    def __init__(self, n_stages: int) -> None:
        self._n_stages = n_stages
        self.vectors: list[HostCopy] = []
        self._total: Tensor | None = None

    def ready(self) -> bool:
        return len(self.vectors) == self._n_stages

    def done(self) -> bool:
        return self.ready() and all(vector.done() for vector in self.vectors)

    def result(self, job: Job | None = None) -> Tensor:
        if not self.ready():
            raise RuntimeError(f"{job}: a stage has not begun the sum")
        if self._total is None:
            first, *others = (vector.read() for vector in self.vectors)
            for vector in others:
                first = first + vector
            self._total = first
        return self._total
