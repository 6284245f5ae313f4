"""Walk through a stage's program, and add up what it holds after every instruction.

    held = fixed + gradients + what F and B have left + messages on their way

Two steps are walked; the second one stands for all: optimizer state is there, and
post-validation still holds the gradients of the step before.
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
)
from zbpp.memory.fixed import Fixed
from zbpp.memory.passes import ChunkPasses, Turns

__all__ = ["Held", "StageWalk"]

_N_STEPS = 2


@dataclass(frozen=True)
class Held:
    """Most that was held at once, in parts that have their most at their own times."""

    gradients: int = 0
    activations: int = 0
    messages: int = 0
    peak: int = 0
    gathered: int = 0


@dataclass
class _Sent:
    """A message that has not left: in all, and the part that no graph holds.

    ``kept`` says which pass of its chunk and micro-batch lets go of the other part.
    """

    full: int
    alone: int
    kept: PassKind | None

    @property
    def n_bytes(self) -> int:
        return self.full if self.kept is None else self.alone


class StageWalk:
    """Bytes that one stage holds while it runs its program.

    Args:
        chunks: passes of the stage's chunks.
        fixed: what is there besides.
        n_chunks: of the whole model.
    """

    def __init__(
        self, chunks: Mapping[int, ChunkPasses], fixed: Fixed, n_chunks: int
    ) -> None:
        self._chunks = chunks
        self._fixed = fixed
        self._n_chunks = n_chunks
        self._sent: list[_Sent] = []
        self._last_gradients = 0
        self._total = fixed.total
        self._is_last = False
        self._n_gathered = 0
        self._most = [0, 0, 0, 0, 0]

    def run(self, program: Program) -> Held:
        """Walk through some steps; return the most of the last one."""
        for step in range(_N_STEPS):
            older = self._sent
            self._sent = []
            self._is_last = step == _N_STEPS - 1
            self._begin(sum(sent.n_bytes for sent in older))
            for instruction in program:
                self._one(instruction)
        return Held(*self._most)

    def _begin(self, sends: int) -> None:
        self._acts: dict[tuple[int, int], int] = {}
        self._messages: dict[Value, int] = {}
        self._sent_of: dict[tuple[int, int], list[_Sent]] = {}
        self._n_acts = self._n_messages = self._n_made = 0
        self._n_sends = self._n_older = sends
        self._made: dict[int, int] = {}
        self._has_b: set[int] = set()
        self._has_w: set[int] = set()
        self._reducing: dict[int, int] = {}
        self._summed: set[int] = set()
        self._b = {chunk: Turns() for chunk in self._chunks}
        self._w = {chunk: Turns() for chunk in self._chunks}
        self._see(0)

    def _one(self, instruction: object) -> None:
        match instruction:
            case Pass():
                self._pass(instruction)
            case Receive(Value() as value):
                self._hold(value, self._size(value))
                self._see(0)
            case Send(Value() as value):
                self._send(value)
            case Reduce():
                self._see(self._fixed.norm)
            case Step():
                if not self._fixed.speculates:  # all sums have come
                    self._let_go()
                self._see(self._fixed.step)
                self._last_gradients = self._n_made if self._fixed.speculates else 0
                self._made, self._n_made = {}, 0
                self._has_b, self._has_w, self._summed = set(), set(), set()
            case Check():
                self._n_sends, self._n_older = self._n_sends - self._n_older, 0
                self._see(self._fixed.commit)
            case Collective():
                self._collective(instruction)

    def _collective(self, job: Collective) -> None:
        """Gather and free parameters; gradients that are divided leave a part."""
        gathered, summed = self._fixed.gathered.get(job.chunk, 0), self._fixed.summed
        match job.kind:
            case CollectiveKind.UNSHARD:
                self._n_gathered += gathered
            case CollectiveKind.RESHARD:
                self._n_gathered -= gathered
            case CollectiveKind.REDUCE_GRAD if summed is not None:
                self._reducing[job.chunk] = self._made.pop(job.chunk, 0)
                if self._fixed.in_turn is None:
                    self._has_b.discard(job.chunk)
                    self._has_w.discard(job.chunk)
            case CollectiveKind.REDUCE_WAIT if summed is not None:
                if self._fixed.in_turn is not None:  # the parts of sums, not wholes
                    self._n_made -= self._reducing.pop(job.chunk)
                if job.chunk not in self._summed:
                    self._summed.add(job.chunk)
                    self._n_made += summed[job.chunk]
                self._see(0)
                self._n_made -= self._reducing.pop(job.chunk, 0)
        self._see(0)

    def _pass(self, job: Pass) -> None:
        chunk = self._chunks[job.chunk]
        value = input_of(job, self._n_chunks)
        if value is not None:
            self._release(value)
        place = (job.chunk, job.microbatch)
        gathered = self._fixed.in_pass.get(job.chunk, 0)
        if job.kind is not PassKind.F:
            self._last_gradients = 0  # the last step has been validated by now
        match job.kind:
            case PassKind.F:
                self._see(chunk.peak_f + gathered)
                self._leave(place, chunk.m_b - self._shared(value))
            case PassKind.B:
                self._b_pass(job, chunk)
            case PassKind.W:
                self._w_pass(job, chunk)
            case PassKind.BW:
                first = job.chunk not in self._has_b
                self._see((chunk.first_peak_bw if first else chunk.peak_bw) + gathered)
                self._b_pass(job, chunk)
                self._w_pass(job, chunk)
        for sent in self._sent_of.get(place, ()):
            if sent.kept in (job.kind, PassKind.B) and job.kind is not PassKind.F:
                self._n_sends += sent.full - sent.alone
                sent.kept = None
        self._give(job, chunk)
        self._see(0)

    def _b_pass(self, job: Pass, chunk: ChunkPasses) -> None:
        is_first = job.chunk not in self._has_b
        if job.kind is PassKind.B:
            peak = chunk.first_peak_b if is_first else chunk.peak_b
            self._see(peak + self._fixed.in_pass.get(job.chunk, 0))
        self._has_b.add(job.chunk)
        self._leave((job.chunk, job.microbatch), chunk.m_w)
        if is_first:
            self._make(job.chunk, chunk.made_in_b)

    def _w_pass(self, job: Pass, chunk: ChunkPasses) -> None:
        turns = self._w[job.chunk]
        for microbatch in turns.run(job.microbatch, in_order=self._fixed.in_order):
            is_first = job.chunk not in self._has_w and chunk.made_in_w > 0
            self._has_w.add(job.chunk)
            if job.kind is PassKind.W:
                self._see(chunk.first_peak_w if is_first else chunk.peak_w)
            self._leave((job.chunk, microbatch), 0)
            if is_first:
                self._make(job.chunk, chunk.made_in_w)
        if self._fixed.in_turn is not None:
            self._make(job.chunk, self._fixed.in_turn[job.chunk])

    def _give(self, job: Pass, chunk: ChunkPasses) -> None:
        value = output_of(job, self._n_chunks)
        if value is None:
            return
        messages = chunk.messages
        is_forward = job.kind is PassKind.F
        self._hold(value, messages.y_alone if is_forward else messages.dx_alone)

    def _shared(self, value: Value | None) -> int:
        """Bytes that a chunk reads and a chunk of the same stage keeps as well."""
        if value is None or value.chunk not in self._chunks:
            return 0
        messages = self._chunks[value.chunk].messages
        return messages.y - messages.y_alone

    def _send(self, value: Value) -> None:
        self._release(value)
        messages = self._chunks[value.chunk].messages
        place = (value.chunk, value.microbatch)
        if value.what is What.ACTIVATION:
            sent = _Sent(messages.y, messages.y_alone, PassKind.B)
        else:
            kept = PassKind.W if place in self._acts else None
            sent = _Sent(messages.dx, messages.dx_alone, kept)
        if not self._fixed.keeps_sends:
            self._let_go()
        self._sent.append(sent)
        self._sent_of.setdefault(place, []).append(sent)
        self._n_sends += sent.n_bytes
        self._see(0)

    def _let_go(self) -> None:
        """All that was sent has been received."""
        self._sent, self._sent_of = [], {}
        self._n_sends = self._n_older = 0

    def _size(self, value: Value) -> int:
        """Bytes of a value that comes from another stage."""
        if value.what is What.ACTIVATION:
            return self._chunks[value.chunk + 1].messages.x
        return self._chunks[value.chunk - 1].messages.dy

    def _hold(self, value: Value, n_bytes: int) -> None:
        self._messages[value] = n_bytes
        self._n_messages += n_bytes

    def _release(self, value: Value) -> None:
        self._n_messages -= self._messages.pop(value, 0)

    def _leave(self, place: tuple[int, int], n_bytes: int) -> None:
        self._n_acts += n_bytes - self._acts.pop(place, 0)
        if n_bytes:
            self._acts[place] = n_bytes

    def _make(self, chunk: int, n_bytes: int) -> None:
        self._made[chunk] = self._made.get(chunk, 0) + n_bytes
        self._n_made += n_bytes

    def _see(self, extra: int) -> None:
        """Note what is held now, with something on top of it; the last step counts."""
        if not self._is_last:
            return
        most = self._most
        gradients = self._n_made + self._last_gradients
        activations = self._n_acts + extra
        messages = self._n_messages + self._n_sends
        total = self._total + gradients + activations + messages + self._n_gathered
        if gradients > most[0]:
            most[0] = gradients
        if activations > most[1]:
            most[1] = activations
        if messages > most[2]:
            most[2] = messages
        if total > most[3]:
            most[3] = total
        most[4] = max(most[4], self._n_gathered)
