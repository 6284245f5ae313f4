"""Single tensors on their way between two stages, told apart by tags."""

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Message
from zbpp.runtime.comm.channels import Channel, Port
from zbpp.runtime.comm.waits import Lost, Waits

__all__ = ["Wire"]


class Wire:
    """The sends and receives of one stage.

    Args:
        stage: whose they are.
        channels: by (sending stage, receiving stage).
        device: that tensors must be on.
        waits: of the stage.
        lost: makes the error of a message.
    """

    def __init__(
        self,
        stage: int,
        channels: Mapping[tuple[int, int], Channel],
        device: torch.device,
        waits: Waits,
        lost: Lost,
    ) -> None:
        self.channels = channels
        self.device = device
        self._is_gloo = device.type == "cpu"
        self.training = True
        self._stage = stage
        self._waits = waits
        self._lost = lost
        self._outgoing: deque[tuple[dist.Work, Tensor, Message, int]] = deque()
        self._to: dict[tuple[Message, int], Port] = {}
        self._from: dict[tuple[Message, int], Port] = {}
        self._n_finished = 0
        self._n_older = 0  # sends of the steps before this one

    def begin(self, *, training: bool) -> None:
        """Start a step, or an evaluation."""
        self.training = training
        self._n_older = self.n_sent

    @property
    def n_sent(self) -> int:
        """Tensors sent so far; they are finished in this order."""
        return self._n_finished + len(self._outgoing)

    def send(self, value: Message, tensor: Tensor, peer: int, *, slot: int) -> None:
        """Start to send; the tensor is kept until it has left.

        Raises:
            PeerError: the peer is gone.
        """
        port = self._to.get((value, peer))
        if port is None:
            channel = self.channels[self._stage, peer]
            port = Port(channel.group.send, channel.target, value)
            self._to[value, peer] = port
        try:
            work = port.start(tensor, slot, training=self.training)
        except RuntimeError as error:
            raise self._lost(f"could not send {value} to", peer) from error
        self._outgoing.append((work, tensor, value, peer))
        self._drop_finished()

    def receive(
        self, value: Message, buffer: Tensor, peer: int, *, slot: int
    ) -> dist.Work:
        """Start to receive.

        Raises:
            PeerError: the peer is gone.
        """
        port = self._from.get((value, peer))
        if port is None:
            channel = self.channels[peer, self._stage]
            port = Port(channel.group.recv, channel.source, value)
            self._from[value, peer] = port
        try:
            return port.start(buffer, slot, training=self.training)
        except RuntimeError as error:
            raise self._lost(f"could not receive {value} from", peer) from error

    def _drop_finished(self) -> None:
        """Let go what has left; gloo calls none completed before one waits for it."""
        if not self._is_gloo:
            while self._outgoing and self._outgoing[0][0].is_completed():
                self._finish_oldest("to hand on")

    def finish_older(self) -> None:
        """Wait for the sends of the steps before this one."""
        while self._n_finished < self._n_older:
            self._finish_oldest("the end of the step to hand")

    def let_go(self, n: int) -> None:
        """Forget so many sends, counted from the start on: they have been received."""
        while self._n_finished < n:
            if self._is_gloo:
                self._outgoing.popleft()
                self._n_finished += 1
            else:
                self._finish_oldest("the end of the step to hand")

    @property
    def has_left(self) -> bool:
        """True if no send is under way, as far as is known without a wait."""
        return not self._outgoing

    def flush(self) -> None:
        """Wait on the host until all sends have left."""
        while self._outgoing:
            work = self._outgoing[0][0]
            self._finish_oldest("the end to hand")
            self._waits.confirm(work)

    def close(self) -> None:
        """Let the groups of the channels go."""
        self.channels = {}
        self._to.clear()
        self._from.clear()

    def _finish_oldest(self, doing: str) -> None:
        work, _, value, peer = self._outgoing.popleft()
        self._n_finished += 1
        self._waits.wait(work, (doing, value, "to"), peer)
