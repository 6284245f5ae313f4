"""Values as messages: announced by headers where shapes are new, else posted early."""

from collections import deque
from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Job, Message, Value, What
from zbpp.runtime.comm import header
from zbpp.runtime.comm.channels import HEADER, HEADER_REST, KINDS, Incoming
from zbpp.runtime.comm.header import Spec, spec_of
from zbpp.runtime.comm.shapes import Shapes
from zbpp.runtime.comm.transport import Opening
from zbpp.runtime.comm.waits import Waits, Words
from zbpp.runtime.comm.wire import Wire
from zbpp.runtime.microbatches import check_samples
from zbpp.runtime.support.background import BackgroundWork
from zbpp.runtime.support.errors import ShapeError
from zbpp.runtime.support.streams import HostCopy, sent_ahead
from zbpp.runtime.values import Tensors, nested

__all__ = ["Messages"]

_FIRST = Value(What.ACTIVATION, 0, 0)
"""In the name of which the kinds of a step's micro-batches travel."""


class Messages:
    """The values that one stage sends and receives.

    Args:
        wire: of the stage.
        waits: of the stage.
        background: what it does while it waits.
        stage: whose they are.
        peers: stages that it exchanges values with.
        source: the stage that tells it the kinds of a step's micro-batches; None: it
            reads the inputs.
        followers: the stages that it tells them.
        device: where received tensors live.
    """

    def __init__(
        self,
        wire: Wire,
        waits: Waits,
        background: BackgroundWork,
        *,
        stage: int,
        peers: Collection[int],
        source: int | None,
        followers: Collection[int],
        device: torch.device,
    ) -> None:
        self.stage = stage
        self._wire = wire
        self._on = wire.device
        self._waits = waits
        self.background = background
        self._source = source
        self._followers = followers
        self._device = device
        self._stays = device == wire.device
        """Tensors are sent from where they are."""
        self.shapes = Shapes()
        self._opening: Opening | None = None
        self._told: tuple[dist.Work, HostCopy] | None = None
        self._incoming: dict[Message, Incoming] = {}
        self._waiting: dict[int, deque[Incoming]] = {peer: deque() for peer in peers}

    def begin(self, opening: Opening | None = None) -> None:
        """Start a step, or an evaluation: headers tell the shapes of all its values."""
        self._wire.begin(training=opening is not None)
        self._opening = opening
        self.shapes.begin()
        if opening is None:
            return
        if self._source is None:
            assert opening.inputs is not None, "this stage reads the inputs"
            n_inputs = -1 if opening.n_inputs is None else opening.n_inputs
            self._tell([n_inputs, *self.shapes.number(opening.inputs)])
        else:
            length = opening.n_microbatches + 2
            with self._waits.aside():
                buffer = torch.empty(length, dtype=torch.int64, device=self._on)
                work = self._wire.receive(_FIRST, buffer, self._source, slot=KINDS)
            self._told = work, self._waits.copy_after(work, buffer)

    def _tell(self, told: list[int]) -> None:
        """Take what is told of the step, and hand it on."""
        for peer in self._followers:
            with self._waits.aside():
                numbers = sent_ahead(torch.tensor(told), self._on)
                self._wire.send(_FIRST, numbers, peer, slot=KINDS)
            self._waits.hand_over(numbers)
        self.shapes.tell(told[1:])

    def _listen(self, waiting_for: Words) -> None:
        """Wait for what is told of the step, and post what was waiting for it.

        Raises:
            RequestError: inputs and targets do not belong together.
        """
        assert self._told is not None and self._opening is not None
        (work, copy), self._told = self._told, None
        with self.background.waiting():
            told = self._waits.read(work, copy, waiting_for, self._source).tolist()
        self._tell(told)
        check_samples(None if told[0] < 0 else told[0], self._opening.n_targets)
        for source in self._waiting:
            self._start_known(source)

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Start to send; the tensors are kept until they have left."""
        if isinstance(value, Value) and value.what is What.ACTIVATION:
            known = self.shapes.known(value)
            if known is None or not known.fits(tensors):
                self._announce(value, known, spec_of(value, tensors), peer)
        for slot, tensor in enumerate(tensors, start=1):
            payload = tensor if self._stays else tensor.detach().to(self._on)
            if not payload.is_contiguous():
                payload = payload.detach().contiguous()
            self._wire.send(value, payload, peer, slot=slot)

    def _announce(
        self, value: Value, known: Spec | None, spec: Spec, peer: int
    ) -> None:
        """Send a header where the receiver does not know the shapes yet."""
        if known is None:
            first, rest = header.to_blocks(header.pack(value, spec))
            self._wire.send(value, first.to(self._on), peer, slot=HEADER)
            if rest is not None:
                self._wire.send(value, rest.to(self._on), peer, slot=HEADER_REST)
            self._learn(value, spec)
        elif known != spec:
            raise ShapeError(
                f"stage {self.stage}: the {value} is {spec}, but with inputs of the "
                f"same shapes it was {known}; what is handed from chunk to chunk must "
                "look the same for all micro-batches whose inputs do (pad it, and hand "
                "on numbers that change as tensors)"
            )

    def _learn(self, value: Value, spec: Spec) -> None:
        if self._opening is not None:
            self.shapes.learn(value, spec)

    def post(self, value: Message, peer: int, like: Tensors | None = None) -> None:
        """Start to receive, unless the shapes are still unknown."""
        incoming = Incoming(value, peer, None if like is None else Spec.of(like))
        self._incoming[value] = incoming
        self._waiting[peer].append(incoming)
        self._start_known(peer)

    def _start_known(self, peer: int) -> None:
        """Start the receives from a stage up to the first of unknown shapes."""
        waiting = self._waiting[peer]
        while waiting:
            first = waiting[0]
            spec = first.known or self.shapes.known(first.value)  # type: ignore[arg-type]
            if spec is None:
                break
            self._start(waiting.popleft(), spec)

    def _start(self, incoming: Incoming, spec: Spec) -> None:
        incoming.spec = spec
        value, peer = incoming.value, incoming.peer
        for slot, buffer in enumerate(spec.empty(self._on), start=1):
            incoming.buffers.append(buffer)
            work = self._wire.receive(value, buffer, peer, slot=slot)
            incoming.works.append(work)

    def receive(self, value: Message, job: Job) -> Tensors:
        """Wait for a value, and for the headers of those before it in the channel."""
        incoming = self._incoming.pop(value)
        if self._told is not None:
            self._listen((job, "for", value, "from"))
        waiting = self._waiting[incoming.peer]
        while incoming.spec is None:
            first = waiting.popleft()
            self._start(
                first,
                first.known
                or self.shapes.known(first.value)  # type: ignore[arg-type]
                or self._header(first, job),
            )
        words = (job, "for", value, "from")
        with self.background.waiting():
            for work in incoming.works:
                self._waits.wait(work, words, incoming.peer)
        spec, tensors = incoming.spec, incoming.buffers
        if not self._stays:
            tensors = [buffer.to(self._device) for buffer in tensors]
        for i, needs in enumerate(spec.needs_grad):
            if needs:
                tensors[i].requires_grad_()
        if spec.structure is None:
            return tuple(tensors)
        return nested(tensors, spec.structure)

    def _receive_rest(self, job: Job) -> None:
        """Wait for all values that are posted, so that no sender is cut off."""
        for value in list(self._incoming):
            self.receive(value, job)

    def _header(self, incoming: Incoming, job: Job) -> Spec:
        first = self._block(incoming, header.HEADER_BYTES, HEADER, job)
        n_bytes = header.rest_bytes(first)
        rest = self._block(incoming, n_bytes, HEADER_REST, job) if n_bytes else None
        value = incoming.value
        assert isinstance(value, Value), "a tied gradient has no header"
        spec = header.unpack(header.from_blocks(first, rest), value)
        self._learn(value, spec)
        return spec

    def _block(self, incoming: Incoming, n_bytes: int, slot: int, job: Job) -> Tensor:
        """Wait for a part of a header."""
        value, peer = incoming.value, incoming.peer
        buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self._on)
        work = self._wire.receive(value, buffer, peer, slot=slot)
        with self.background.waiting():
            self._waits.wait(work, (job, "for", value, "from"), peer)
        self._waits.confirm(work)
        return buffer.cpu()

    def end(self) -> None:
        """End the step; sends may still be under way, so no stage waits for another."""
        assert not self._incoming, f"never received: {list(self._incoming)}"
        assert self._told is None, "the kinds of the micro-batches were never read"
        self._wire.finish_older()
