"""What planners are asked for: sizes, times, memory, effort, and chunks a stage."""

from typing import Protocol, Required, TypedDict, Unpack

from zbpp.core import Costs, MemoryModel, RequestError, Schedule

__all__ = [
    "ChunkPlanner",
    "ChunkRequest",
    "Planner",
    "Request",
    "check_sizes",
    "listed_chunks",
    "models",
]


_UNIT = Costs()
_NO_LIMIT = MemoryModel()


class Request(TypedDict, total=False):
    """The keywords that every planner takes; only the sizes must be given."""

    n_stages: Required[int]
    """Stages, at least 1."""
    n_microbatches: Required[int]
    """Micro-batches in a step, at least 1."""
    costs: Costs
    """Times: one entry per chunk, or numbers for whole stages."""
    memory: MemoryModel
    """Likewise; every limit must hold one micro-batch."""
    effort: str
    """``fast``, ``default``, ``best`` or ``best:SECONDS``."""


class ChunkRequest(Request, total=False):
    """A request to a planner that takes any number of chunks a stage."""

    chunks_per_stage: int | None
    """None: as many as the lists of costs and memory are for, else 2."""


class Planner(Protocol):
    """A pure function from a pipeline, its costs and its memory to a schedule."""

    def __call__(self, **request: Unpack[Request]) -> Schedule:
        """Plan."""


class ChunkPlanner(Protocol):
    """A planner of any number of chunks a stage."""

    def __call__(self, **request: Unpack[ChunkRequest]) -> Schedule:
        """Plan."""


def models(request: Request) -> tuple[Costs, MemoryModel]:
    """The costs and the memory of a request, or their defaults."""
    return request.get("costs", _UNIT), request.get("memory", _NO_LIMIT)


def check_sizes(n_stages: int, n_microbatches: int, chunks_per_stage: int = 1) -> None:
    """Refuse sizes below 1.

    Raises:
        RequestError: there is no stage, no micro-batch or no chunk.
    """
    if min(n_stages, n_microbatches, chunks_per_stage) < 1:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each and "
            f"{n_microbatches} micro-batches are asked for; there must be at least 1 "
            "of each"
        )


def listed_chunks(costs: Costs, memory: MemoryModel, n_stages: int) -> int | None:
    """Tell from the lengths of the lists how many chunks a stage they are for.

    >>> listed_chunks(Costs(f=(1.0, 2.0, 2.0, 1.0)), MemoryModel(), n_stages=2)
    2

    None if all are numbers (a list of links says nothing), or if the longest list has
    no whole number of entries a stage: then the planner names the length that it needs.
    """
    values = (costs.f, costs.b, costs.w, costs.optimizer, memory.m_b, memory.m_w)
    lengths = [len(value) for value in values if isinstance(value, tuple)]
    if isinstance(costs.comm, tuple) and len(costs.comm) > n_stages:
        lengths.append(len(costs.comm) + 1)  # one entry per edge
    longest = max(lengths, default=0)
    if n_stages < 1 or longest % n_stages:
        return None
    return longest // n_stages or None
