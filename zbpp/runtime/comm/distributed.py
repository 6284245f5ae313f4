"""Values between processes, on torch.distributed: gloo on CPUs, NCCL on GPUs.

A channel is one pair of neighbours and one direction; it keeps the order of its
messages, and `zbpp.schedules.lower` has proved that both ends name the same order.

    first step   header + payload per message: the receiver learns shapes and dtypes
    later steps  payload only; the receive is posted early, waited for when it is read
    evaluation   header + payload, so that micro-batches may differ in shape

With gloo the messages also carry tags, and CUDA tensors go through host memory (two
stages may share a GPU). With NCCL each channel has a communicator of its own.
All groups are this pipeline's own: others may run beside it or after it.
"""

from collections import deque
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Job, Value, What
from zbpp.runtime.comm.channels import Incoming, PendingSum, join, tag
from zbpp.runtime.comm.failures import FailureNotes
from zbpp.runtime.comm.header import HEADER_LENGTH, Spec, pack, spec_of, unpack
from zbpp.runtime.comm.ping import Ping, PingEnds, ping
from zbpp.runtime.comm.private_group import (
    break_connections,
    gather_objects,
    uses_nccl,
)
from zbpp.runtime.comm.waits import Waits
from zbpp.runtime.microbatches import Tensors, TupleOfOne
from zbpp.runtime.support.background import BackgroundWork
from zbpp.runtime.support.errors import PeerError, ShapeError

__all__ = ["DistributedTransport"]


class DistributedTransport:
    """The messages of one stage that is a process of its own.

    Args:
        group: the pipeline's processes, by stage.
        neighbours: the stages that this one exchanges values with, for every stage.
        device: where received tensors live.
        timeout_s: how long any wait may last after the first step.
        first_timeout_s: the same for the first step (imports, compilation).

    Raises:
        PeerError: a peer died, or did not send or receive in time.
        ShapeError: a micro-batch differs in shape or dtype from the first step's.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        neighbours: list[set[int]],
        device: torch.device,
        timeout_s: float,
        first_timeout_s: float,
    ) -> None:
        self.background = BackgroundWork(in_thread=device.type == "cpu")
        self.stage = dist.get_rank(group)
        self._device = device
        self._nccl = uses_nccl(group)
        self._wire = device if self._nccl else torch.device("cpu")
        self._steady_timeout_s = timeout_s
        self._waits = Waits(
            nccl=self._nccl,
            device=device,
            timeout_s=first_timeout_s,
            lost=self._lost,
        )
        try:
            self._all, self._channels, store = join(
                group,
                neighbours,
                nccl=self._nccl,
                device=device,
                timeout_s=first_timeout_s,
            )
        except RuntimeError as error:
            raise PeerError(
                f"stage {self.stage} does not reach the others at the start: {error}"
            ) from error
        ranks = dist.get_process_group_ranks(group)
        self._notes = FailureNotes(store, self.stage, ranks)
        self.doing = "the start"
        self._has_failed = False
        self._specs: dict[int, Spec] = {}  # of each chunk's activations in training
        self._incoming: dict[Value, Incoming] = {}
        self._waiting: dict[int, deque[Incoming]] = {
            peer: deque() for peer in neighbours[self.stage]
        }
        self._outgoing: deque[tuple[dist.Work, Tensor, Value, int]] = deque()
        self._training = True
        self._n_older = 0  # sends of steps before this one that are not finished

    def begin(self, *, training: bool) -> None:
        """Start a step: headers tell the shapes of an evaluation and a first step."""
        self._notes.withdraw()
        self._training = training
        self._n_older = len(self._outgoing)

    def send(self, value: Value, tensors: Tensors, peer: int) -> None:
        """Start to send; the tensors are kept until they have left."""
        if value.what is What.ACTIVATION:
            self._announce(value, spec_of(value, tensors), peer)
        for slot, tensor in enumerate(tensors, start=1):
            payload = tensor.detach().to(self._wire).contiguous()
            self._send_one(value, payload, peer, slot=slot)
        while self._outgoing and self._outgoing[0][0].is_completed():
            self._finish_oldest("to hand on")

    def _announce(self, value: Value, spec: Spec, peer: int) -> None:
        """Send a header where the receiver does not know the shapes yet."""
        known = self._specs.get(value.chunk) if self._training else None
        if known is None:
            self._send_one(value, pack(value, spec).to(self._wire), peer, slot=0)
            if self._training:
                self._specs[value.chunk] = spec
        elif known != spec:
            raise ShapeError(
                f"stage {self.stage}: the {value} is {spec}, but in the first step it "
                f"was {known}; give every micro-batch the same shape and dtype (pad or "
                "drop the last batch)"
            )

    def _send_one(self, value: Value, tensor: Tensor, peer: int, *, slot: int) -> None:
        channel = self._channels[self.stage, peer]
        try:
            number = tag(value, slot, training=self._training)
            work = channel.group.send([tensor], channel.target, number)
        except RuntimeError as error:
            raise self._lost(f"could not send {value} to", peer, error) from error
        self._outgoing.append((work, tensor, value, peer))

    def post(self, value: Value, peer: int) -> None:
        """Start to receive, unless the shapes are still unknown."""
        incoming = Incoming(value, peer)
        self._incoming[value] = incoming
        self._waiting[peer].append(incoming)
        while self._waiting[peer]:
            spec = self._known_spec(self._waiting[peer][0].value)
            if spec is None:
                break
            self._start(self._waiting[peer].popleft(), spec)

    def _known_spec(self, value: Value) -> Spec | None:
        """Shapes and dtypes of a message, if it needs no header."""
        if value.what is What.GRADIENT:  # as the activation that this stage has sent
            sent = self._specs.get(value.chunk - 1)
            return None if sent is None else sent.of_gradients()
        return self._specs.get(value.chunk) if self._training else None

    def _start(self, incoming: Incoming, spec: Spec) -> None:
        incoming.spec = spec
        for slot, buffer in enumerate(spec.empty(self._wire), start=1):
            incoming.buffers.append(buffer)
            incoming.works.append(self._receive_one(incoming, buffer, slot=slot))

    def _receive_one(
        self, incoming: Incoming, buffer: Tensor, *, slot: int
    ) -> dist.Work:
        peer = incoming.peer
        channel = self._channels[peer, self.stage]
        try:
            number = tag(incoming.value, slot, training=self._training)
            return channel.group.recv([buffer], channel.source, number)
        except RuntimeError as error:
            what = f"could not receive {incoming.value} from"
            raise self._lost(what, peer, error) from error

    def ready(self, value: Value) -> bool:
        """Return True: a receive waits for another process."""
        return True

    def receive(self, value: Value, job: Job) -> Tensors:
        """Wait for a value, and for the headers of those before it in the channel."""
        incoming = self._incoming.pop(value)
        waiting = self._waiting[incoming.peer]
        while incoming.spec is None:
            first = waiting.popleft()
            self._start(
                first, self._known_spec(first.value) or self._header(first, job)
            )
        with self.background.waiting():
            for work in incoming.works:
                self._waits.wait(work, f"{job} for {value} from", incoming.peer)
        tensors = (buffer.to(self._device) for buffer in incoming.buffers)
        kind = TupleOfOne if incoming.spec.is_tuple_of_one else tuple
        return kind(
            tensor.requires_grad_(needs and value.what is What.ACTIVATION)
            for tensor, needs in zip(tensors, incoming.spec.needs_grad, strict=True)
        )

    def _header(self, incoming: Incoming, job: Job) -> Spec:
        buffer = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._wire)
        work = self._receive_one(incoming, buffer, slot=0)
        self._waits.wait(work, f"{job} for {incoming.value} from", incoming.peer)
        self._waits.confirm(work)
        spec = unpack(buffer.cpu(), incoming.value)
        if self._training:
            self._specs[incoming.value.chunk] = spec
        return spec

    def _lost(self, what: str, peer: int | None, error: RuntimeError) -> PeerError:
        who = "the other stages" if peer is None else f"stage {peer}"
        why = "the connection broke"
        if "imed out" in str(error) or "imeout" in str(error):
            why = f"no answer in {self._waits.timeout_s:g} s"
        if not self._has_failed and (first := self._notes.explain(peer, self.doing)):
            why += f"; {first}"
        self._cut_off()
        return PeerError(f"stage {self.stage} {what} {who}: {why}")

    def report(self, error: BaseException, *, ends: bool = True) -> None:
        """Tell the other stages why this one stops, or cannot begin a step.

        Args:
            error: the cause; gets a note that names the rank that failed first.
            ends: break the connections, so that the others learn of it at once.
        """
        if self._has_failed or isinstance(error, PeerError):
            return
        first = self._notes.report(error, self.doing)
        if ends:
            if first:
                error.add_note(first)
            self._cut_off()

    def _cut_off(self) -> None:
        if not self._has_failed and not self._nccl:
            break_connections(self._all)
        self._has_failed = True

    def reduce(self, vector: Tensor) -> PendingSum:
        """Start an all-reduce; every entry has one non-zero summand, so it is exact."""
        vector = vector.to(self._wire)
        try:
            work = self._all.allreduce([vector])
        except RuntimeError as error:
            raise self._lost("could not begin a sum with", None, error) from error
        return PendingSum(vector, work, self._waits.finish)

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all, by rank."""
        try:
            if not self._nccl:  # waits no longer than a step does, unlike the gather
                self._all.monitored_barrier(timedelta(seconds=self._waits.timeout_s))
            return gather_objects(self._all, thing, self._wire)
        except RuntimeError as error:
            raise self._lost("waits at a gather for", None, error) from error

    def ping(self, peer: int, n_bytes: int, rounds: int) -> list[Ping]:
        """Time messages between two steps; the stage with the lower number learns."""
        channels = self._channels[self.stage, peer], self._channels[peer, self.stage]
        return ping(
            PingEnds(*channels, self._device, self._wire),
            n_bytes,
            rounds,
            leads=self.stage < peer,
            wait=partial(self._waits.wait, what="a ping with", peer=peer),
        )

    def message_bytes(self) -> dict[int, int]:
        """Sizes of the activations that steps send or receive here, by chunk."""
        return {chunk: spec.n_bytes for chunk, spec in self._specs.items()}

    def end(self) -> None:
        """End the step; sends may still be under way, so no stage waits for another.

        Those of the step before have been received, as this step has seen its sums.
        They are let go here: gloo calls no send completed before one waits for it.
        """
        assert not self._incoming, f"never received: {list(self._incoming)}"
        if self._training:
            self._waits.timeout_s = self._steady_timeout_s
        while self._n_older > 0:
            self._finish_oldest("the end of the step to hand")

    def flush(self) -> None:
        """Wait until all sends have left."""
        while self._outgoing:
            self._finish_oldest("the end to hand")

    def _finish_oldest(self, doing: str) -> None:
        work, _, value, peer = self._outgoing.popleft()
        self._n_older -= 1
        self._waits.wait(work, f"{doing} {value} to", peer)

    def close(self) -> None:
        """Give back the groups."""
        for group in {*(c.group for c in self._channels.values()), self._all}:
            group.shutdown()
