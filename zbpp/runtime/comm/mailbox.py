"""The values of a stage in a separate process, over a link.

A channel is one pair of neighbours and one direction; it keeps the order of its
messages, and `zbpp.schedules.lower` has proved that both ends have the same order.

    shapes known   payload only; the receive is posted early, waited for when it is read
    new shapes     header + payload: the receiver learns shapes and dtypes (`shapes`)

What moves single tensors is a link (`links`): gloo on CPUs, NCCL on GPUs.
"""

import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Check, Job, Message, Value, What
from zbpp.runtime.comm.failures import Failures
from zbpp.runtime.comm.groups import open_groups
from zbpp.runtime.comm.links import Link, PendingSum
from zbpp.runtime.comm.place import Place
from zbpp.runtime.comm.shapes import Shapes, Spec
from zbpp.runtime.comm.transport import Expected, Transport
from zbpp.runtime.microbatches import MicroBatches, check_samples
from zbpp.runtime.support.errors import NonFiniteError, PeerError, SumsError
from zbpp.runtime.values import Tensors, nested

_PATIENCE_S = 10.0  # where a script has not called close

_FIRST = Value(What.ACTIVATION, 0, 0)
"""Named in errors of the message with the kinds of a step's micro-batches."""


class _Begun(NamedTuple):
    """The receives of a value's tensors."""

    spec: Spec
    buffers: Sequence[Tensor]
    works: Sequence[dist.Work]


@dataclass(slots=True, eq=False)
class _PostedReceive(Expected):
    """A value that will come; its receives begin once the shapes are known."""

    mailbox: "Mailbox"
    value: Message
    peer: int
    spec: Spec | None
    begun: _Begun | None = None

    def receive(self, job: Job | str) -> Tensors:
        """Wait for the value, and for the headers of those before it in the channel."""
        return self.mailbox.receive(self, job)


class Mailbox(Transport):
    """The messages of one stage in a separate process.

    All processes that step together must create one, which connects them. The stage
    ``reader`` reads the inputs. No wait lasts longer than ``timeout_s``, or for the
    first step, with imports and compilation, ``first_timeout_s``.

    Raises:
        PeerError: from all methods: a process died, or did not answer in time.
    """

    def __init__(
        self,
        place: Place,
        neighbours: Sequence[set[int]],
        reader: int,
        *,
        device: torch.device,
        timeout_s: float,
        first_timeout_s: float,
    ) -> None:
        self.peers, self.stage = place, place.pipeline.index(place.rank)
        try:
            groups = open_groups(
                place, neighbours, device=device, timeout_s=first_timeout_s
            )
        except PeerError:
            raise
        except RuntimeError as error:
            raise PeerError(
                f"stage {self.stage} does not reach the others at the start: {error}"
            ) from error
        self.on_device = groups.on_device
        self._failures = Failures(
            groups, place, call=lambda: self.doing, timeout_s=first_timeout_s
        )
        self._link = Link(groups, self._failures)
        self._reader, self._device = reader, device
        self._steady_timeout_s = timeout_s
        self._of_steps, self._of_evaluations = Shapes(), Shapes()
        self._shapes = self._of_steps
        self._is_step = False
        self._posted: dict[_PostedReceive, None] = {}
        """Announced values that are not received yet, in order."""
        self._waiting: Mapping[int, deque[_PostedReceive]] = {
            peer: deque() for peer in neighbours[self.stage]
        }
        """Of each stage, the receives that have not begun, in order."""
        self._sum: PendingSum | None = None

    # Steps.

    def begin(self, batch: MicroBatches | None = None) -> None:
        """Start a step or an evaluation; without a batch, its shapes are known."""
        self._failures.withdraw()
        self._is_step = batch is None or batch.training
        self._link.begin(training=self._is_step)
        if batch is None:
            return
        self._shapes = self._of_steps if self._is_step else self._of_evaluations
        n_inputs, forgets, kinds = self._share(batch)
        self._shapes.take(forgets, kinds)
        if self._is_step:
            check_samples(n_inputs, batch.n_targets)

    def _share(self, batch: MicroBatches) -> tuple[int | None, bool, list[int]]:
        """Give all stages what the reader of the inputs knows of them."""
        known: tuple[int | None, bool, list[int]]
        if self.stage != self._reader:
            context = ("the start", "for the size of the batch from")
            known = pickle.loads(self._link.read_bytes(context, self._reader))
            return known
        if batch.inputs is None:
            raise RuntimeError("the stage that reads the inputs has none")
        known = batch.n_inputs, *self._shapes.number(batch.inputs)
        for peer in range(self.peers.n_stages):
            if peer != self.stage:
                self._link.send_bytes(_FIRST, pickle.dumps(known), peer)
        return known

    def end(self) -> None:
        """End the step; sends may still be under way, so no stage waits for another."""
        if self._is_step:
            self._failures.timeout_s = self._steady_timeout_s
        if self._posted:
            names = ", ".join(str(x.value) for x in self._posted)
            raise RuntimeError(f"never received: {names}")
        self._link.end()

    # Values.

    def send(self, value: Message, tensors: Tensors, peer: int) -> None:
        """Start to send; the tensors are kept until they have left."""
        if isinstance(value, Value):
            header = self._shapes.header(value, tensors)
            if header is not None:
                self._link.send_bytes(value, header, peer)
        device = self._link.device
        for tensor in tensors:
            payload = tensor if tensor.device == device else tensor.detach().to(device)
            self._link.send(value, payload, peer)

    def post(self, value: Message, peer: int, like: Tensors | None = None) -> Expected:
        """Start to receive, unless the shapes are still unknown."""
        spec = None if like is None else Spec.of(like)
        posted = _PostedReceive(self, value, peer, spec)
        self._posted[posted] = None
        self._waiting[peer].append(posted)
        self._begin_known(peer)
        return posted

    def receive(self, posted: _PostedReceive, job: Job | str) -> Tensors:
        """Wait for a value, and for the headers of those before it in the channel."""
        del self._posted[posted]
        peer, context = posted.peer, (job, "for", posted.value, "from")
        self._begin_known(peer)  # a gradient's shapes are learnt where a value is sent
        while posted.begun is None:
            first = self._waiting[peer][0].value
            assert isinstance(first, Value)
            header = self._link.read_bytes(context, peer)
            self._shapes.learn(first, pickle.loads(header))
            self._begin_known(peer)
        spec, tensors, works = posted.begun
        for work in works:
            self._link.wait(work, context, peer)
        if self._link.device != self._device:
            tensors = [buffer.to(self._device) for buffer in tensors]
        for tensor, look in zip(tensors, spec.looks, strict=True):
            if look.needs_grad:
                tensor.requires_grad_()
        if spec.structure is None:
            return tuple(tensors)
        return nested(tensors, spec.structure)

    def _begin_known(self, peer: int) -> None:
        """Begin the receives from a stage up to the first of unknown shapes."""
        waiting = self._waiting[peer]
        while waiting:
            posted = waiting[0]
            spec, value = posted.spec, posted.value
            if spec is None and isinstance(value, Value):
                spec = self._shapes.known(value)
            if spec is None:
                return
            waiting.popleft()
            device = self._link.device
            buffers = [
                torch.empty(x.shape, dtype=x.dtype, device=device) for x in spec.looks
            ]
            works = [self._link.receive(value, buffer, peer) for buffer in buffers]
            posted.begun = _Begun(spec, buffers, works)

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
        """Give every process the picklable things of all, by rank."""
        return self._link.gather(thing)

    def message_bytes(self) -> dict[int, int]:
        """Sizes of the activations that steps send or receive here, by chunk."""
        return self._of_steps.n_bytes()

    # Failures.

    def lost_peer(self, job: str, error: RuntimeError) -> PeerError:
        """The error for a collective of this stage's peers that has broken in a job."""
        return self._failures.replica_error(job)

    def report(self, error: BaseException, *, ends: bool = True) -> None:
        """Tell the other stages why this one stops, or cannot begin a step.

        A NonFiniteError or SumsError they find in the same sums themselves. Until then
        they send what this stage has posted, which it receives. Any other error that
        ``ends`` the pipeline breaks the connections, so that they learn of it at once.
        """
        if self._failures.has_failed or isinstance(error, PeerError):
            return
        if isinstance(error, NonFiniteError | SumsError):
            for posted in list(self._posted):
                self.receive(posted, Check(self.stage))
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

    def abandon(self) -> None:
        """Wait a little for what others still need, and end: the pipeline is gone."""
        if self._failures.has_failed:
            return
        self._failures.timeout_s = min(_PATIENCE_S, self._failures.timeout_s)
        with suppress(PeerError):
            if self._sum is not None:
                self._sum.result()
            self.flush()
            self.close()

    def close(self) -> None:
        """End the groups and, with their last references, gloo's threads."""
        self._link.close()
