"""The one walk over a stage's program: what it holds, by kind of bytes.

    resident     parameters, optimizer state, ..      always
    gradients    the first B and W of a chunk         until the optimizer step
    activations  F, and what B leaves of it           until W
    messages     a receive until it is read; a send until it has gone
    gathered     UNSHARD                              until RESHARD

Passes add what the rows of the cost table say (`zbpp.memory.passes`). Two steps are
walked; the second one stands for all: post-validation still holds the gradients of
the step before.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zbpp.core import (
    Check,
    Collective,
    CollectiveKind,
    Pass,
    PassKind,
    Program,
    Receive,
    Reduce,
    Send,
    Step,
    Value,
    What,
    input_of,
    output_of,
    reader,
)
from zbpp.memory.passes import ChunkPasses
from zbpp.memory.resident import ResidentMemory

__all__ = ["PeakUsage", "walk_stage"]


@dataclass(frozen=True)
class PeakUsage:
    """Most that was held at once, in parts that have their most at their own times."""

    gradients: int
    activations: int
    messages: int
    gathered: int
    total: int


def walk_stage(
    program: Program,
    chunks: Mapping[int, ChunkPasses],
    resident: ResidentMemory,
    n_chunks: int,
) -> PeakUsage:
    """Walk through the steps of one stage; return the most of the second one.

    Args:
        program: of the stage.
        chunks: passes of its chunks.
        resident: what it holds all the time.
        n_chunks: of the whole model.
    """
    walk = _StageWalk(chunks, resident, n_chunks)
    walk.step(program)
    walk.most = _Held()
    walk.step(program)
    most = walk.most
    return PeakUsage(
        gradients=most.gradients,
        activations=most.activations,
        messages=most.messages,
        gathered=most.gathered,
        total=resident.total + most.total,
    )


@dataclass
class _Held:
    """Bytes of each kind beside what is resident."""

    gradients: int = 0
    activations: int = 0
    messages: int = 0
    gathered: int = 0
    total: int = 0


@dataclass(frozen=True)
class _Row:
    """A pass of a chunk: the most inside it, what it leaves, and what it sends.

    ``sent`` are the bytes of its message that no graph holds; ``freed`` those of
    earlier messages that its end lets the graph forget.
    """

    peak: int
    first_peak: int
    leaves: int
    makes: tuple[tuple[PassKind, int], ...]
    sent: int
    freed: int


class _StageWalk:
    def __init__(
        self, chunks: Mapping[int, ChunkPasses], resident: ResidentMemory, n_chunks: int
    ) -> None:
        self._chunks, self._resident, self._n_chunks = chunks, resident, n_chunks
        self._rows = {(k, c): self._row(k, c) for k in PassKind for c in chunks}
        self._held, self.most = _Held(), _Held()
        self._last_gradients = 0
        """Of the step before, which its V may need for a rollback."""
        self._sent = self._sent_before = 0
        """Sends of this step and of the one before that may not have gone."""

    def _row(self, kind: PassKind, index: int) -> _Row:
        chunk = self._chunks[index]
        messages = chunk.messages
        y, dx = messages.y_unshared, messages.dx_unshared
        leaves_y, leaves_dx = (
            index + 1 not in self._chunks,
            index - 1 not in self._chunks,
        )
        in_b, in_w = (
            (PassKind.B, chunk.gradients_in_b),
            (PassKind.W, chunk.gradients_in_w),
        )
        old_y, old_dx = (messages.y - y) * leaves_y, (messages.dx - dx) * leaves_dx
        gathered = 0 if kind is PassKind.W else self._resident.in_pass.get(index, 0)
        leaves, makes, sent, freed = {
            PassKind.F: (chunk.m_b, (), y, 0),
            PassKind.B: (chunk.m_w - chunk.m_b, (in_b,), dx, old_y),
            PassKind.W: (-chunk.m_w, (in_w,), 0, old_dx),
            PassKind.BW: (-chunk.m_b, (in_b, in_w), messages.dx, old_y),
        }[kind]
        return _Row(
            peak=chunk.peak(kind) + gathered,
            first_peak=chunk.peak(kind, first=kind is not PassKind.F) + gathered,
            leaves=leaves,
            makes=makes,
            sent=sent,
            freed=freed if self._resident.keeps_sends else 0,
        )

    def step(self, program: Program) -> None:
        """Run through one step."""
        self._whole: dict[int, int] = {}
        """Gradients of each chunk that are not summed yet."""
        self._made: set[tuple[PassKind, int]] = set()
        """Parts of whole gradients that are there."""
        self._reducing: dict[int, int] = {}
        self._has_part: set[int] = set()
        self._waiting: dict[Value, int] = {}
        self._sent_before, self._sent = self._sent, 0
        for instruction in program:
            inside = 0
            match instruction:
                case Pass():
                    self._pass(instruction)
                case Receive(Value() as value):
                    messages = self._chunks[reader(value)].messages
                    is_forward = value.what is What.ACTIVATION
                    self._put(value, messages.x if is_forward else messages.dy)
                case Send(Value() as value):
                    self._send(value)
                case Reduce():
                    inside = self._resident.tied
                case Step():
                    self._end_step()
                case Check():
                    self._held.messages -= self._sent_before
                    self._sent_before = 0
                    inside = self._resident.commit
                case Collective():
                    self._collective(instruction)
            self._see(inside)

    def _pass(self, job: Pass) -> None:
        held, row = self._held, self._rows[job.kind, job.chunk]
        value = input_of(job, self._n_chunks)
        if value is not None:
            held.messages -= self._waiting.pop(value, 0)
        if job.kind is not PassKind.F:  # the step before has been validated
            held.gradients -= self._last_gradients
            self._last_gradients = 0
        new = [(k, n) for k, n in row.makes if (k, job.chunk) not in self._made]
        is_first = bool(row.makes) and row.makes[0] in new
        self._see(row.first_peak if is_first else row.peak)
        held.activations += row.leaves
        for kind, n_bytes in new:
            self._made.add((kind, job.chunk))
            self._whole[job.chunk] = self._whole.get(job.chunk, 0) + n_bytes
            held.gradients += n_bytes
        self._sent += row.freed
        held.messages += row.freed
        value = output_of(job, self._n_chunks)
        if value is not None:
            self._put(value, row.sent)

    def _put(self, value: Value, n_bytes: int) -> None:
        self._waiting[value] = n_bytes
        self._held.messages += n_bytes

    def _send(self, value: Value) -> None:
        if not self._resident.keeps_sends:
            self._held.messages -= self._sent
            self._sent = 0
        self._sent += self._waiting.pop(value, 0)

    def _end_step(self) -> None:
        held, speculates = self._held, self._resident.speculates
        if not speculates:  # all sums have come, and so have all messages
            held.messages -= self._sent + self._sent_before
            self._sent = self._sent_before = 0
        self._see(self._resident.step)
        self._last_gradients = held.gradients if speculates else 0
        held.gradients = self._last_gradients

    def _collective(self, job: Collective) -> None:
        """Gather and free parameters; gradients that are divided leave a part."""
        held, chunk = self._held, job.chunk
        gathered, parts = self._resident.gathered.get(chunk, 0), self._resident.summed
        match job.kind:
            case CollectiveKind.UNSHARD:
                held.gathered += gathered
            case CollectiveKind.RESHARD:
                held.gathered -= gathered
            case CollectiveKind.REDUCE_GRAD if parts is not None:
                self._reducing[chunk] = self._whole.pop(chunk, 0)
                self._made = {made for made in self._made if made[1] != chunk}
            case CollectiveKind.REDUCE_WAIT if parts is not None:
                if chunk not in self._has_part:
                    self._has_part.add(chunk)
                    held.gradients += parts[chunk]
                self._see()
                held.gradients -= self._reducing.pop(chunk, 0)

    def _see(self, inside: int = 0) -> None:
        """Note what is held now, with what a pass or a step needs inside."""
        held, most = self._held, self.most
        activations = held.activations + inside
        total = held.gradients + activations + held.messages + held.gathered
        most.gradients = max(most.gradients, held.gradients)
        most.activations = max(most.activations, activations)
        most.messages = max(most.messages, held.messages)
        most.gathered = max(most.gathered, held.gathered)
        most.total = max(most.total, total)
