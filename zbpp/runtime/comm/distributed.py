"""Values between processes, on torch.distributed: gloo on CPUs, NCCL on GPUs.

A channel is one pair of neighbours and one direction; it keeps the order of its
messages, and `zbpp.schedules.lower` has proved that both ends name the same order.

    first step   header + payload per message: the receiver learns shapes and dtypes
    later steps  payload only; the receive is posted early, waited for when it is read
    evaluation   header + payload, so that micro-batches may differ in shape

With gloo the messages also carry tags, and CUDA tensors go through host memory (two
stages may share a GPU). With NCCL each channel has a communicator of its own.
"""

import time
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Job, Value, What
from zbpp.runtime.comm.channels import (
    Incoming,
    PendingSum,
    open_channels,
    tag,
    uses_nccl,
)
from zbpp.runtime.comm.header import HEADER_LENGTH, Spec, pack, spec_of, unpack
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
        self._group = group
        self.stage = dist.get_rank(group)
        self._device = device
        self._nccl = uses_nccl(group)
        self._wire = device if self._nccl else torch.device("cpu")
        self._timeout_s = first_timeout_s
        self._steady_timeout_s = timeout_s
        self._channels = open_channels(
            group, neighbours, device=device, timeout_s=first_timeout_s
        )
        self._sums = dist.new_group(  # nothing queues behind a sum that is under way
            dist.get_process_group_ranks(group),
            timeout=timedelta(seconds=first_timeout_s),
            use_local_synchronization=True,
        )
        self._specs: dict[int, Spec] = {}  # of each chunk's activations in training
        self._incoming: dict[Value, Incoming] = {}
        self._waiting: dict[int, deque[Incoming]] = {
            peer: deque() for peer in neighbours[self.stage]
        }
        self._outgoing: deque[tuple[dist.Work, Tensor, Value, int]] = deque()
        self._unconfirmed: deque[tuple[dist.Work, str, int | None]] = deque()
        self._training = True
        self._n_older = 0  # sends of steps before this one that are not finished
        self._side: torch.Stream | None = None

    def begin(self, *, training: bool) -> None:
        """Start a step: headers tell the shapes of an evaluation and a first step."""
        self._training = training
        self._n_older = len(self._outgoing)

    def send(self, value: Value, tensors: Tensors, peer: int) -> None:
        """Start to send; the tensors are kept until they have left."""
        if value.what is What.ACTIVATION:
            self._announce(value, spec_of(tensors), peer)
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
            work = dist.isend(
                tensor,
                group=channel.group,
                group_dst=channel.target,
                tag=tag(value, slot),
            )
        except RuntimeError as error:
            raise self._lost(f"could not send {value} to", peer, error) from error
        assert work is not None
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
        """What a message will look like, if it needs no header."""
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
            work = dist.irecv(
                buffer,
                group=channel.group,
                group_src=channel.source,
                tag=tag(incoming.value, slot),
            )
        except RuntimeError as error:
            what = f"could not receive {incoming.value} from"
            raise self._lost(what, peer, error) from error
        assert work is not None
        return work

    def ready(self, value: Value) -> bool:
        """Always: a receive waits for another process."""
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
                self._wait(work, f"{job} for {value} from", incoming.peer)
        tensors = (buffer.to(self._device) for buffer in incoming.buffers)
        kind = TupleOfOne if incoming.spec.is_tuple_of_one else tuple
        return kind(
            tensor.requires_grad_(needs and value.what is What.ACTIVATION)
            for tensor, needs in zip(tensors, incoming.spec.needs_grad, strict=True)
        )

    def _header(self, incoming: Incoming, job: Job) -> Spec:
        buffer = torch.empty(HEADER_LENGTH, dtype=torch.int64, device=self._wire)
        work = self._receive_one(incoming, buffer, slot=0)
        self._wait(work, f"{job} for {incoming.value} from", incoming.peer)
        self._confirm(work)
        spec = unpack(buffer.cpu(), incoming.value)
        if self._training:
            self._specs[incoming.value.chunk] = spec
        return spec

    def _wait(self, work: dist.Work, what: str, peer: int | None) -> None:
        """Wait for a message; with NCCL the GPU waits, and the host in `_confirm`."""
        try:
            if self._nccl:
                work.wait()  # with a time-out it would hold up the host
                while self._unconfirmed and self._unconfirmed[0][0].is_completed():
                    self._unconfirmed.popleft()
                self._unconfirmed.append((work, what, peer))
            else:
                work.wait(timedelta(seconds=self._timeout_s))
        except RuntimeError as error:
            raise self._lost(f"waits at {what}", peer, error) from error

    def _confirm(self, last: dist.Work) -> None:
        """Wait on the host until a message has come; name the oldest late one."""
        deadline = time.monotonic() + self._timeout_s
        while self._nccl and not last.is_completed():
            if time.monotonic() > deadline:
                late = RuntimeError("timed out")
                for work, what, peer in self._unconfirmed:
                    if not work.is_completed():
                        raise self._lost(f"waits at {what}", peer, late)
            time.sleep(1e-4)

    def _finish(self, work: dist.Work, vector: Tensor, what: str) -> Tensor:
        """Wait for a collective, and bring its vector to the host.

        With NCCL on a stream of its own, so that the copy waits for no forward.
        """
        if not self._nccl:
            self._wait(work, what, None)
            return vector
        if self._side is None:
            self._side = torch.Stream(self._device)
        with self._side:
            self._wait(work, what, None)
            self._confirm(work)
            return vector.cpu()

    def _lost(self, what: str, peer: int | None, error: RuntimeError) -> PeerError:
        who = "the other stages" if peer is None else f"stage {peer}"
        text = str(error)
        late = "imed out" in text or "imeout" in text
        why = f"no answer in {self._timeout_s:g} s" if late else "the connection broke"
        return PeerError(f"stage {self.stage} {what} {who}: {why}")

    def reduce(self, vector: Tensor) -> PendingSum:
        """Start an all-reduce; every entry has one non-zero summand, so it is exact."""
        vector = vector.to(self._wire)
        work = dist.all_reduce(vector, group=self._sums, async_op=True)
        assert work is not None
        return PendingSum(vector, work, self._finish)

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all, by rank."""
        things: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            if not self._nccl:  # waits no longer than a step does, unlike the gather
                dist.monitored_barrier(
                    self._group, timeout=timedelta(seconds=self._timeout_s)
                )
            dist.all_gather_object(things, thing, group=self._group)
        except RuntimeError as error:
            raise self._lost("waits at a gather for", None, error) from error
        return things

    def end(self) -> None:
        """End the step; sends may still be under way, so no stage waits for another.

        Those of the step before have been received, as this step has seen its sums.
        They are let go here: gloo calls no send completed before one waits for it.
        """
        assert not self._incoming, f"never received: {list(self._incoming)}"
        if self._training:
            self._timeout_s = self._steady_timeout_s
        while self._n_older > 0:
            self._finish_oldest("the end of the step to hand")

    def flush(self) -> None:
        """Wait until all sends have left."""
        while self._outgoing:
            self._finish_oldest("the end to hand")

    def _finish_oldest(self, doing: str) -> None:
        work, _, value, peer = self._outgoing.popleft()
        self._n_older -= 1
        self._wait(work, f"{doing} {value} to", peer)

    def close(self) -> None:
        """Give back the group of the sums; the pipeline's belongs to the caller."""
        dist.destroy_process_group(self._sums)
