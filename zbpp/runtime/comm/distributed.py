"""Values between processes, on torch.distributed: gloo on CPUs, NCCL on GPUs.

A channel is one pair of neighbours and one direction; it keeps the order of its
messages, and `zbpp.schedules.lower` has proved that both ends name the same order.

    step         payload only; the receive is posted early, waited for when it is read
    new shapes   header + payload: the receiver learns shapes and dtypes (`shapes`)
    evaluation   header + payload per message

With gloo the messages also carry tags, and CUDA tensors go through host memory (two
stages may share a GPU). With NCCL each channel has a communicator of its own.
All groups are this pipeline's own: others may run beside it or after it.
"""

import atexit
import logging
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zbpp.core import Check, Message
from zbpp.runtime.comm.channels import PendingSum, join
from zbpp.runtime.comm.failures import FailureNotes
from zbpp.runtime.comm.messages import Messages
from zbpp.runtime.comm.peers import ALONE, Peers
from zbpp.runtime.comm.ping import Ping, PingEnds, ping
from zbpp.runtime.comm.private_group import (
    PrivateGroup,
    break_connections,
    gather_objects,
    open_group,
)
from zbpp.runtime.comm.transport import Opening
from zbpp.runtime.comm.waits import Waits, Words
from zbpp.runtime.comm.wire import Wire
from zbpp.runtime.support.background import BackgroundWork
from zbpp.runtime.support.collectives import backend_of, wire_of
from zbpp.runtime.support.errors import NonFiniteError, PeerError
from zbpp.runtime.support.streams import HostCopy

__all__ = ["DistributedTransport"]

_log = logging.getLogger("zbpp")

_SUM_PATIENCE_S = 10.0  # before others are told: for the end of their last step
_SUM_POLL_S = 0.01
_NOTHING_COMES_S = 0.05  # once the connections are broken
_EXIT_PATIENCE_S = 10.0  # where a script has not called close
_PATIENCE_S = 2.0  # for the notes of stages that see the connections break


class DistributedTransport(Messages):
    """The messages of one stage that is a process of its own.

    Args:
        everyone: the processes that step together.
        pipeline: ranks of this pipeline's among them, by stage.
        neighbours: the stages that this one exchanges values with, for every stage.
        sources: the stage that tells each one the kinds of a step's micro-batches; None
            for the one that reads the inputs.
        device: where received tensors live.
        timeout_s: how long any wait may last after the first step.
        first_timeout_s: the same for the first step (imports, compilation).
        peers: processes of the same stage.
        sides: groups of this process with them; with gloo their collectives wait no
            longer than messages do, and after a failure they are broken.

    Raises:
        PeerError: a peer died, or did not send or receive in time.
        ShapeError: a value cannot be sent, or does not look as it did for a micro-batch
            of the same shapes.
    """

    is_local = False

    def __init__(
        self,
        everyone: dist.ProcessGroup,
        pipeline: Sequence[int],
        *,
        neighbours: list[set[int]],
        sources: list[int | None],
        device: torch.device,
        timeout_s: float,
        first_timeout_s: float,
        peers: Peers = ALONE,
        sides: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.stage = stage = pipeline.index(dist.get_rank(everyone))
        self.peers = peers
        self._pipeline, self._sides = pipeline, sides
        backend = backend_of(everyone, device)
        self._on_device = on_device = backend != "gloo"
        self._steady_timeout_s = timeout_s
        waits = Waits(
            on_device=on_device,
            device=device,
            timeout_s=first_timeout_s,
            lost=self._lost,
        )
        try:
            self._all, channels, store, name = join(
                *(everyone, pipeline, neighbours),
                backend=backend,
                device=device,
                timeout_s=first_timeout_s,
            )
            self._replicas: PrivateGroup | None = None
            if len(peers.ranks) > 1:  # of the hosts: shares are numbers there
                self._replicas = open_group(
                    *(everyone, peers.ranks, f"{name}/replicas_{peers.ranks[0]}"),
                    backend="gloo",
                    timeout_s=first_timeout_s,
                )
        except RuntimeError as error:
            raise PeerError(
                f"stage {stage} does not reach the others at the start: {error}"
            ) from error
        ranks = _ranks_of(everyone)
        self._notes = FailureNotes(store, dist.get_rank(everyone), ranks)
        self.doing = "the start"
        self._has_failed = False
        self._sum: PendingSum | None = None
        self._n_sent = 0
        """Tensors that were sent before the last sum began."""
        on = wire_of(backend, device)
        super().__init__(
            Wire(stage, channels, on, waits, self._lost),
            waits,
            BackgroundWork(in_thread=device.type == "cpu"),
            stage=stage,
            peers=neighbours[stage],
            source=sources[stage],
            followers=[t for t, source in enumerate(sources) if source == stage],
            device=device,
        )
        self._limit_waits(first_timeout_s)
        _open.add(self)

    def _limit_waits(self, seconds: float) -> None:
        """Set the time-out of messages, and with gloo of the peers' collectives.

        NCCL's cannot be waited for so: its time-out would end the process.
        """
        self._waits.timeout_s = seconds
        if not self._on_device:
            for group in self._sides:
                group.set_timeout(timedelta(seconds=seconds))

    @property
    def on_device(self) -> bool:
        """True if a receive occupies the device until its value comes."""
        return self._on_device

    def begin(self, opening: Opening | None = None) -> None:
        """Start a step, or an evaluation: headers tell the shapes of all its values."""
        self._notes.withdraw()
        super().begin(opening)

    def ready(self, value: Message) -> bool:
        """Return True: a receive waits for another process."""
        return True

    def _lost(self, what: str, peer: int | None, *, is_late: bool = False) -> PeerError:
        lost = [] if peer is None else [self._pipeline[peer]]
        who = "the other stages" if peer is None else f"stage {peer}"
        why, patience_s = "the connection broke", _PATIENCE_S
        if is_late:
            why = f"no answer in {self._waits.timeout_s:g} s"
            patience_s = self._late_patience_s
        return self._failure(f"{what} {who}", lost, why, patience_s)

    def lost_peer(self, job: str, error: RuntimeError) -> PeerError:
        """The error for a collective of this stage's peers that has broken.

        Args:
            job: it was in.
            error: of the collective.
        """
        lost = {rank for side in self._sides for rank in _ranks_of(side)}
        lost.discard(self._pipeline[self.stage])
        why = "they have not ended a collective"
        what = f"waits in {job} for its replicas"
        return self._failure(what, sorted(lost), why, self._late_patience_s)

    @property
    def _late_patience_s(self) -> float:
        """For stages that began to wait later than this one, by a part of a step."""
        return max(_PATIENCE_S, 0.1 * self._waits.timeout_s)

    def _failure(
        self, what: str, lost: Sequence[int], why: str, patience_s: float
    ) -> PeerError:
        """Find out who failed first, and break the connections."""
        if self._has_failed:
            why = "the connections were given up after the first failure"
        elif first := self._notes.explain(lost, self.doing, patience_s=patience_s):
            why += f"; {first}"
        self._cut_off()
        return PeerError(f"stage {self.stage} {what}: {why}")

    def report(self, error: BaseException, *, ends: bool = True) -> None:
        """Tell the other stages why this one stops, or cannot begin a step.

        A NonFiniteError they read from the same sum, and raise it themselves. Until
        then they send what this stage has posted.

        Args:
            error: the cause; gets a note that names the rank that failed first.
            ends: break the connections, so that the others learn of it at once.
        """
        if self._has_failed or isinstance(error, PeerError):
            return
        if isinstance(error, NonFiniteError):
            self._receive_rest(Check(self.stage))
            return
        first = self._notes.report(error, self.doing)
        if ends:
            if first:
                error.add_note(first)
            self._end_sum()
            self._cut_off()

    def _end_sum(self) -> None:
        """Let the sum of the step that has ended come: the caller may want its state.

        The other stages begin it without anything more from this one.
        """
        deadline = time.monotonic() + min(_SUM_PATIENCE_S, self._waits.timeout_s)
        while self._sum and not self._sum.done() and time.monotonic() < deadline:
            time.sleep(_SUM_POLL_S)

    def _cut_off(self) -> None:
        """Let the others fail at once, and nothing here wait for them any more."""
        if self._has_failed:
            return
        self._has_failed = True
        for group in (*self._groups(), *self._sides):
            if self._on_device and group is not self._replicas:
                _backend_of(group, self._device).abort()
            else:
                break_connections(cast("PrivateGroup", group))
        self._waits.timeout_s = _NOTHING_COMES_S

    def reduce(self, vector: Tensor) -> PendingSum:
        """Start an all-reduce; every entry has one non-zero summand, so it is exact."""
        vector = self.peers.spread(vector.to(self._on))
        try:
            work = self._all.allreduce([vector])
            copy = self._waits.copy_after(work, vector)
        except RuntimeError as error:
            raise self._lost("could not begin a sum with", None) from error
        self._n_sent = self._wire.n_sent
        self._sum = PendingSum(work, copy, partial(self._finish_sum, self._n_sent))
        return self._sum

    def _finish_sum(
        self, n_sent: int, work: dist.Work, copy: HostCopy, what: Words
    ) -> None:
        """Wait for a sum, and let go what was sent before this stage began it.

        All stages begin it behind their passes: what these read has been received.
        """
        self._waits.finish(work, copy, what)
        self._wire.let_go(n_sent)

    def add_over_replicas(self, numbers: Tensor) -> PendingSum | None:
        """Start to sum numbers of the host over replicas; None: there is one."""
        if self._replicas is None:
            return None
        try:
            work = self._replicas.allreduce([numbers])
        except RuntimeError as error:
            raise self._lost("could not begin a sum with", None) from error
        return PendingSum(work, HostCopy(numbers), self._waits.finish)

    def gather(self, thing: Any) -> list[Any]:
        """Give every process the things of all, by rank."""
        try:
            if not self._on_device:
                # It waits no longer than a step does, unlike the gather.
                self._all.monitored_barrier(timedelta(seconds=self._waits.timeout_s))
            return gather_objects(self._all, thing, self._on)
        except RuntimeError as error:
            raise self._lost("waits at a gather for", None) from error

    def gather_pipeline(self, thing: Any) -> list[Any]:
        """Give every process the things of its pipeline, by stage; all must call."""
        every = self.gather(thing)
        return [every[rank] for rank in self._pipeline]

    def ping(self, peer: int, n_bytes: int, rounds: int) -> list[Ping]:
        """Time messages between two steps; the stage with the lower number learns."""
        channels = self._wire.channels
        ends = channels[self.stage, peer], channels[peer, self.stage]
        return ping(
            PingEnds(*ends, self._device, self._on),
            n_bytes,
            rounds,
            leads=self.stage < peer,
            wait=partial(self._waits.wait, what=("a ping with",), peer=peer),
        )

    def message_bytes(self) -> dict[int, int]:
        """Sizes of the activations that steps send or receive here, by chunk."""
        return {chunk: x.n_bytes for chunk, x in self.shapes.latest().items()}

    def end(self) -> None:
        """End the step; sends may still be under way, so no stage waits for another.

        Those of the step before have been received, as this step has seen its sums.
        They are let go then, or here: gloo calls no send completed before one waits for
        it.
        """
        is_first = self._waits.timeout_s != self._steady_timeout_s
        if self._opening is not None and is_first:
            self._limit_waits(self._steady_timeout_s)
        super().end()

    def flush(self) -> None:
        """Wait until all sends have left."""
        self._wire.flush()

    def let_go(self) -> None:
        """End without waiting for anyone: nobody will call this transport any more.

        The others may still need what it has begun. Then its groups stay until that is
        done, which is looked up whenever a pipeline is dropped, or Python ends.
        """
        if self._has_failed:
            return
        _left_open.add(self)
        for transport in [*_left_open]:
            if transport._is_idle():
                transport.close()
        if self in _left_open:
            _log.warning(
                "stage %d: a Pipeline was dropped before its last messages and sums "
                "had ended; call close(), or write `with zbpp.Pipeline(...)`",
                self.stage,
            )

    def _is_idle(self) -> bool:
        """True if the others need nothing more of this process; waits for nothing.

        With NCCL a send may have left and not arrived: only `close` can know.
        """
        if self._on_device or (self._sum is not None and not self._sum.done()):
            return False
        self._wire.let_go(self._n_sent)  # the sum is there, so they have been received
        return self._wire.has_left

    def _end_at_exit(self) -> None:
        """Wait a little for what others need, and end; Python does."""
        self._waits.timeout_s = min(_EXIT_PATIENCE_S, self._waits.timeout_s)
        with suppress(PeerError):
            if self._sum is not None:
                self._sum.result()
            self.flush()
            self.close()

    def close(self) -> None:
        """End the groups and, with their last references, gloo's threads.

        A thread that still lets go of a tensor when Python ends aborts the process.
        """
        _open.discard(self)
        _left_open.discard(self)
        for group in self._groups():
            group.shutdown()
        self._wire.close()
        del self._all
        self._replicas = None

    def _groups(self) -> list[PrivateGroup]:
        """The groups that are open, in an order that is the same on all members."""
        groups = [self._all, *(c.group for c in self._wire.channels.values())]
        if self._replicas is not None:
            groups.append(self._replicas)
        return list(dict.fromkeys(groups))


_open: "weakref.WeakSet[DistributedTransport]" = weakref.WeakSet()
_left_open: set[DistributedTransport] = set()
"""Those of pipelines that were dropped while others still needed something of them."""


@atexit.register
def _end_all() -> None:
    for transport in [*_open]:
        if not transport._has_failed:
            transport._end_at_exit()


def _ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _backend_of(group: Any, device: torch.device) -> Any:
    """A group of torch's holds a backend for each kind of device; ours are backends."""
    if isinstance(group, dist.ProcessGroup):
        return group._get_backend(device)
    return group
