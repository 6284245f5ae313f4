"""Values between stages that live in one process: they lie in one hub.

stage 0   send A0.0 ---> | hub | ---> receive A0.0   stage 1
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field

from torch import Tensor

from zbpp.core import Job, Message
from zbpp.runtime.comm.transport import Expected, Transport
from zbpp.runtime.support.streams import HostCopy
from zbpp.runtime.values import Tensors

__all__ = ["LocalHub", "LocalMailbox"]


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


class _LocalSum:
    """Added up on the host, where every stage's vector goes when it is there.

    So no V waits for the forwards before it.
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


@dataclass(slots=True, eq=False)
class _InHub(Expected):
    """A value that a stage of this process will send."""

    mail: dict[Message, deque[Tensors]]
    value: Message

    def ready(self) -> bool:
        """True if the value is in the mailbox."""
        return self.value in self.mail

    def receive(self, job: Job | str) -> Tensors:
        """Take the tensors out of the mailbox."""
        copies = self.mail[self.value]
        tensors = copies.popleft()
        if not copies:
            del self.mail[self.value]
        return tensors


class LocalMailbox(Transport):
    """The messages of one of several stages that share a process and a hub."""

    is_local = True

    def __init__(self, hub: LocalHub) -> None:
        self._hub = hub
        self._n_sums = 0

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Put the tensors into the mailbox, behind an older copy if there is one."""
        self._hub.mail[value].append(tensors)

    def post(self, value: Message, peer: int, like: Tensors | None = None) -> "_InHub":
        """Name a value that will be in the mailbox."""
        return _InHub(self._hub.mail, value)

    def reduce(self, vector: Tensor) -> _LocalSum:
        """Add to this process's n-th sum, n being this stage's count so far."""
        sums, n_stages = self._hub.sums, self._hub.n_stages
        if self._n_sums == len(sums):
            sums.append(_LocalSum(n_stages))
        pending = sums[self._n_sums]
        self._n_sums += 1
        pending.add(vector)
        return pending

    def end(self) -> None:
        """The last stage to end finds the mailbox empty, and clears the sums."""
        hub = self._hub
        self._n_sums = 0
        hub.n_ended += 1
        if hub.n_ended == hub.n_stages:
            assert not hub.mail, f"never received: {list(hub.mail)}"
            hub.sums.clear()
            hub.n_ended = 0
