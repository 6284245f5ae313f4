"""The values of a stage that is a process of its own, over a link.

A channel is one pair of neighbours and one direction; it keeps the order of its
messages, and `zbpp.schedules.lower` has proved that both ends name the same order.

    step         payload only; the receive is posted early, waited for when it is read
    new shapes   header + payload: the receiver learns shapes and dtypes (`shapes`)
    evaluation   header + payload per message

What moves single tensors is a link (`links`): gloo on CPUs, NCCL on GPUs.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Check, Job, Message, Value, What
from zbpp.runtime.comm.failures import Failures
from zbpp.runtime.comm.groups import open_groups
from zbpp.runtime.comm.links import (
    HostWaits,
    P2PLink,
    PendingSum,
    StreamWaits,
)
from zbpp.runtime.comm.place import Place
from zbpp.runtime.comm.shapes import HEADER_BYTES, Shapes, Spec, pack, spec_of, unpack
from zbpp.runtime.comm.transport import Expected, Opening, Transport
from zbpp.runtime.microbatches import check_filled, check_samples
from zbpp.runtime.support.errors import (
    NonFiniteError,
    PeerError,
    ShapeError,
    SumsError,
)
from zbpp.runtime.support.streams import SideStream
from zbpp.runtime.values import Tensors, nested

__all__ = ["Mailbox", "StageLinks", "connect"]

_PATIENCE_S = 10.0  # where a script has not called close

_FIRST = Value(What.ACTIVATION, 0, 0)
"""In the name of which the kinds of a step's micro-batches travel."""


@dataclass(frozen=True)
class StageLinks:
    """The stages that exchange messages, the same on all stages.

    Args:
        neighbours: of every stage, those that it sends to, and receives from.
        reader: the stage that reads the inputs, and tells the others the kinds of a
            step's micro-batches.
    """

    neighbours: Sequence[set[int]]
    reader: int


@dataclass(slots=True, eq=False)
class _PostedReceive(Expected):
    """A value that will come; its buffers exist once the shapes are known.

    Args:
        mailbox: to which it was announced.
        like: its shapes, if this end knows them without the other.
    """

    mailbox: "Mailbox"
    value: Message
    peer: int
    like: Spec | None = None
    spec: Spec | None = None
    buffers: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)

    def receive(self, job: Job | str) -> Tensors:
        """Wait for the value, and for the headers of those before it in the channel."""
        return self.mailbox.receive(self, job)


class Mailbox(Transport):
    """The messages of one stage that is a process of its own.

    Args:
        link: moves single tensors.
        stages: which stages exchange what.
        place: of this process.
        device: where received tensors live.
        timeout_s: how long any wait may last after the first step.

    Raises:
        PeerError: a peer died, or did not send or receive in time.
        ShapeError: a value cannot be sent, or does not look as it did for a micro-batch
            of the same shapes.
    """

    def __init__(
        self,
        link: P2PLink,
        stages: StageLinks,
        *,
        place: Place,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._link = link
        self._failures = link.failures
        self.stage = self._failures.stage
        self.peers = place
        self._device = device
        self.on_device = link.on_device
        self._reader, self._n_stages = stages.reader, len(stages.neighbours)
        self._steady_timeout_s = timeout_s
        self._shapes = Shapes()
        self._is_step = False
        self._posted: dict[_PostedReceive, None] = {}
        """Announced values that are not received yet, in order."""
        self._waiting: Mapping[int, deque[_PostedReceive]] = {
            peer: deque() for peer in stages.neighbours[self.stage]
        }
        """Of each stage, the receives that have not begun, in order."""
        self._sum: PendingSum | None = None

    @property
    def doing(self) -> str:
        """The call that is under way, for the words of a failure."""
        return self._failures.current_call

    @doing.setter
    def doing(self, call: str) -> None:
        self._failures.current_call = call

    # Steps.

    def begin(self, opening: Opening | None = None) -> int | None:
        """Start a step, or an evaluation: headers tell the shapes of all its values.

        Raises:
            RequestError: inputs and targets do not belong together.
        """
        self._failures.withdraw()
        self._is_step = opening is not None and opening.training
        self._link.begin(training=self._is_step)
        self._shapes.begin()
        if opening is None:
            return None
        size = opening.n_microbatches + 3
        if self.stage == self._reader:
            assert opening.inputs is not None, "this stage reads the inputs"
            n_inputs = -1 if opening.n_inputs is None else opening.n_inputs
            n_filled = opening.n_filled or opening.n_microbatches
            numbers = [n_inputs, n_filled]
            if self._is_step:
                numbers += self._shapes.number(opening.inputs)
            numbers += [0] * (size - len(numbers))
            message = torch.tensor(numbers)
            for peer in range(self._n_stages):
                if peer != self.stage:
                    self._link.send_numbers(_FIRST, message, peer)
        else:
            like = torch.empty(size, dtype=torch.int64)
            context = ("the start", "for the size of the batch from")
            message = self._link.read_numbers(_FIRST, like, context, self._reader)
            numbers = message.tolist()
            n_inputs, n_filled = numbers[:2]
        if self._is_step:
            self._shapes.take(numbers[2:])
            check_samples(None if n_inputs < 0 else n_inputs, opening.n_targets)
        check_filled(n_filled, opening.n_filled)
        return n_filled

    def end(self) -> None:
        """End the step; sends may still be under way, so no stage waits for another.

        Those of the step before have been received, as this step has seen its sums.
        They are let go then, or here.
        """
        is_first = self._failures.timeout_s != self._steady_timeout_s
        if self._is_step and is_first:
            self._failures.limit_waits(self._steady_timeout_s)
        assert not self._posted, f"never received: {[x.value for x in self._posted]}"
        self._link.end()

    # Values.

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Start to send; the tensors are kept until they have left."""
        if isinstance(value, Value):
            known_spec = self._shapes.known(value)
            if known_spec is None or not known_spec.fits(tensors):
                self._announce(value, known_spec, spec_of(value, tensors), peer)
        device = self._link.device
        for tensor in tensors:
            payload = tensor if tensor.device == device else tensor.detach().to(device)
            self._link.send(value, payload, peer)

    def _announce(
        self, value: Value, known_spec: Spec | None, spec: Spec, peer: int
    ) -> None:
        """Send a header where the receiver does not know the shapes yet."""
        if known_spec is None:
            self._link.send_numbers(value, pack(value, spec), peer)
            self._shapes.learn(value, spec)
        elif known_spec != spec:
            if replace(known_spec, needs_grad=spec.needs_grad) == spec:
                raise ShapeError(
                    f"stage {self.stage}: the {value} needs gradients for "
                    f"{sum(spec.needs_grad)} tensors, and before for "
                    f"{sum(known_spec.needs_grad)}: parameters were frozen or thawed, "
                    "which stages in several processes do not learn; build a new "
                    "Pipeline then, from a checkpoint"
                )
            raise ShapeError(
                f"stage {self.stage}: the {value} is {spec}, but with inputs of the "
                f"same shapes it was {known_spec}; what is handed from chunk to chunk "
                "must look the same for all micro-batches whose inputs do (pad it, and "
                "hand on numbers that change as tensors)"
            )

    def post(
        self, value: Message, peer: int, like: Tensors | None = None
    ) -> _PostedReceive:
        """Start to receive, unless the shapes are still unknown."""
        spec = None if like is None else Spec.of(like)
        posted = _PostedReceive(self, value, peer, spec)
        self._posted[posted] = None
        self._waiting[peer].append(posted)
        self._start_known(peer)
        return posted

    def receive(self, posted: _PostedReceive, job: Job | str) -> Tensors:
        """Wait for a value, and for the headers of those before it in the channel."""
        del self._posted[posted]
        context = (job, "for", posted.value, "from")
        waiting = self._waiting[posted.peer]
        while posted.spec is None:
            first = waiting.popleft()
            spec = first.like or self._shapes.known(first.value)
            self._start(first, spec or self._read_header(first, job))
        for work in posted.works:
            self._link.wait(work, context, posted.peer)
        return self._value_of(posted, posted.spec)

    def _value_of(self, posted: _PostedReceive, spec: Spec) -> Tensors:
        """Put a value together from what has come."""
        tensors, device = posted.buffers, self._device
        if self._link.device != device:
            tensors = [buffer.to(device) for buffer in tensors]
        for tensor, needs in zip(tensors, spec.needs_grad, strict=True):
            if needs:
                tensor.requires_grad_()
        if spec.structure is None:
            return tuple(tensors)
        return nested(tensors, spec.structure)

    def _receive_rest(self, job: Job) -> None:
        """Wait for all values that are posted, so that no sender is cut off."""
        for posted in list(self._posted):
            self.receive(posted, job)

    def _start_known(self, peer: int) -> None:
        """Start the receives from a stage up to the first of unknown shapes."""
        waiting = self._waiting[peer]
        while waiting:
            spec = waiting[0].like or self._shapes.known(waiting[0].value)
            if spec is None:
                break
            self._start(waiting.popleft(), spec)

    def _start(self, posted: _PostedReceive, spec: Spec) -> None:
        value, posted.spec = posted.value, spec
        for place in range(len(spec.shapes)):
            buffer = spec.empty(place, self._link.device)
            work = self._link.receive(value, buffer, posted.peer)
            posted.buffers.append(buffer)
            posted.works.append(work)

    def _read_header(self, posted: _PostedReceive, job: Job | str) -> Spec:
        """Wait for the shapes of a value."""
        value, peer = posted.value, posted.peer
        assert isinstance(value, Value)
        like = torch.empty(HEADER_BYTES, dtype=torch.uint8)
        context = (job, "for", value, "from")
        header = self._link.read_numbers(value, like, context, peer)
        spec = unpack(header, value)
        self._shapes.learn(value, spec)
        return spec

    # All processes.

    def reduce(self, vector: Tensor) -> PendingSum:
        """Start an all-reduce; every entry has one non-zero summand, so it is exact."""
        table = self.peers.scatter_into_table(vector.to(self._link.device))
        self._sum = self._link.sum(table)
        return self._sum

    def sum_numbers(self, numbers: Tensor) -> PendingSum:
        """Start to sum numbers of the host over all processes."""
        return self._link.sum_numbers(numbers)

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all, by rank."""
        return self._link.gather(thing)

    def gather_pipeline(self, thing: Any) -> list[Any]:
        """Give every process the things of its pipeline, by stage; all must call."""
        things = self.gather(thing)
        return [things[rank] for rank in self.peers.pipeline]

    def message_bytes(self) -> dict[int, int]:
        """Sizes of the activations that steps send or receive here, by chunk."""
        return {chunk: spec.n_bytes for chunk, spec in self._shapes.latest.items()}

    # Failures.

    def lost_peer(self, job: str, error: RuntimeError) -> PeerError:
        """The error for a collective of this stage's peers that has broken in a job."""
        return self._failures.replica_error(job)

    def report(self, error: BaseException, *, ends: bool = True) -> None:
        """Tell the other stages why this one stops, or cannot begin a step.

        A NonFiniteError or SumsError they find in the same sums themselves. Until then
        they send what this stage has posted.

        Args:
            error: the cause; gets a note that names the rank that failed first.
            ends: break the connections, so that the others learn of it at once.
        """
        if self._failures.has_failed or isinstance(error, PeerError):
            return
        if isinstance(error, NonFiniteError | SumsError):
            self._receive_rest(Check(self.stage))
            return
        first = self._failures.report(error)
        if ends:
            if first:
                error.add_note(first)
            self._failures.abort()

    # The end.

    def flush(self) -> None:
        """Wait until all sends have left."""
        self._link.flush()

    def let_go(self) -> None:
        """Wait a little for what others still need, and end: the pipeline is gone."""
        if self._failures.has_failed:
            return
        patience = timedelta(seconds=_PATIENCE_S)
        self._failures.timeout = min(patience, self._failures.timeout)
        with suppress(PeerError):
            if self._sum is not None:
                self._sum.result()
            self.flush()
            self.close()

    def close(self) -> None:
        """End the groups and, with their last references, gloo's threads."""
        self._link.close()


def connect(
    place: Place,
    stages: StageLinks,
    *,
    device: torch.device,
    timeout_s: float,
    first_timeout_s: float,
) -> Mailbox:
    """Connect this process to the others; all that step together must call.

    Args:
        place: of this process.
        stages: which stages exchange what.
        device: where received tensors live.
        timeout_s: how long any wait may last after the first step.
        first_timeout_s: the same for the first step (imports, compilation).

    Raises:
        PeerError: a process did not come.
    """
    try:
        groups = open_groups(
            place, stages.neighbours, device=device, timeout_s=first_timeout_s
        )
    except PeerError:
        raise
    except RuntimeError as error:
        stage = place.pipeline.index(place.rank)
        raise PeerError(
            f"stage {stage} does not reach the others at the start: {error}"
        ) from error
    failures = Failures(groups, place, timeout_s=first_timeout_s)
    waits: HostWaits | StreamWaits = HostWaits(failures)
    if groups.on_device:
        waits = StreamWaits(failures, SideStream(device))
    link = P2PLink(groups, failures, waits)
    return Mailbox(link, stages, place=place, device=device, timeout_s=timeout_s)
