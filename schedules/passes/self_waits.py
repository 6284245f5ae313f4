"""Find where a stage that waits for its whole device would wait for itself.

Some jobs wait for all that a GPU has under way: the allocator before it gives memory
back, ``torch.cuda.synchronize``, the tuning of a kernel.
A receive by NCCL is under way from where it is posted until its value comes, and a send
until the other end has posted its receive. So a receive that is posted too early stops
the job that its own value depends on:

    stage 0 | F0> +B0 F1> BW0 ...      F1 waits for the gradient that BW0 sends, and
    stage 1 | +F0 F0 +F1 BW0> F1 ...   BW0 for the activation that F1 sends

Neither of the two would wait for itself alone. So every stage is made to wait at every
job: where even that ends, so do fewer waits. It depends on no times, nor on how the
receives were placed. Processes that hold the same stage run the same program, and come
to each of their collectives as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from zbpp.core import Instruction, Message, Program, Receive, Reduce, Send

__all__ = ["SelfWait", "find_self_waits"]

_UnderWay = Receive | Send | Reduce


@dataclass(frozen=True)
class SelfWait:
    """Jobs that wait for each other in a circle.

    Args:
        waits: stage, job, and what the job waits for. The stage of the next entry is
            at the other end of that message; behind the last one comes the first.
    """

    waits: tuple[tuple[int, Instruction, _UnderWay], ...]

    def __str__(self) -> str:
        return ", ".join(
            f"stage {stage} in {job} waits for: {message}"
            for stage, job, message in self.waits
        )


def find_self_waits(programs: Sequence[Program]) -> list[SelfWait]:
    """List the circles of jobs that wait for their devices.

    Empty: whichever jobs wait for their devices, the step ends. To find what lies
    behind a circle, the first wait of each is then left out.

    Args:
        programs: of all stages.
    """
    run = _Run(programs)
    circles = []
    while run.go_on():
        circle = run.circle()
        stage, _, message = circle.waits[0]
        run.left_out.add((stage, run.columns[stage], message))
        circles.append(circle)
    return circles


@dataclass
class _Run:
    """Programs whose jobs all wait for what their stage has under way."""

    programs: Sequence[Program]
    columns: list[int] = field(init=False)
    under_way: list[list[_UnderWay]] = field(init=False)
    posted: set[tuple[Message, int]] = field(default_factory=set)
    sent: set[tuple[Message, int]] = field(default_factory=set)
    """Messages, each with the stage that receives it."""
    reducing: set[int] = field(default_factory=set)
    left_out: set[tuple[int, int, _UnderWay]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.columns = [0] * len(self.programs)
        self.under_way = [[] for _ in self.programs]

    def go_on(self) -> bool:
        """Run all stages as far as they can; True if one is stuck."""
        before = None
        while before != self.columns:
            before = list(self.columns)
            for stage, program in enumerate(self.programs):
                while self.columns[stage] < len(program) and self._run_one(stage):
                    self.columns[stage] += 1
        return any(c < len(p) for c, p in zip(self.columns, self.programs, strict=True))

    def _run_one(self, stage: int) -> bool:
        """Run a stage's next instruction; False if it has to wait."""
        match self.programs[stage][self.columns[stage]]:
            case Receive(value) as message:
                self.posted.add((value, stage))
            case Send(value, peer) as message:
                self.sent.add((value, peer))
            case Reduce() as message:
                self.reducing.add(stage)
            case _:
                under_way = self.under_way[stage]
                under_way[:] = [
                    m for m in under_way if self._peer(stage, m) is not None
                ]
                return all(
                    (stage, self.columns[stage], m) in self.left_out for m in under_way
                )
        self.under_way[stage].append(message)
        return True

    def _peer(self, stage: int, message: _UnderWay) -> int | None:
        """The stage that a message waits for; None: it waits for none."""
        match message:
            case Receive(value, peer):
                return None if (value, stage) in self.sent else peer
            case Send(value, peer):
                return None if (value, peer) in self.posted else peer
            case Reduce():
                missing = set(range(len(self.programs))) - self.reducing
                return min(missing, default=None)

    def circle(self) -> SelfWait:
        """Follow the waits of stuck stages until one comes again."""
        stage = next(s for s, p in enumerate(self.programs) if self.columns[s] < len(p))
        waits: dict[int, tuple[int, Instruction, _UnderWay]] = {}
        while stage not in waits:
            column = self.columns[stage]
            message = next(
                m
                for m in self.under_way[stage]
                if (stage, column, m) not in self.left_out
            )
            waits[stage] = stage, self.programs[stage][column], message
            peer = self._peer(stage, message)
            assert peer is not None, "a stuck stage waits for another one"
            stage = peer
        stages = list(waits)
        return SelfWait(tuple(waits[s] for s in stages[stages.index(stage) :]))
