"""Requests to planners: sizes, times, memory, effort, and chunks a stage."""

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
    """Times: one entry per chunk or stage, or numbers for all stages."""
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


_MOST_JOBS = 2**24  # with effort fast, minutes and some GB of memory
_MOST_CHUNKS = 2**13  # the time of lower bounds grows with their square


def check_sizes(n_stages: int, n_microbatches: int, chunks_per_stage: int = 1) -> None:
    """Refuse sizes below 1, and those that would be planned for hours.

    Raises:
        RequestError: there is none of one of them, or too many; it says how many jobs
            or chunks are asked for, and how many are planned at most.
    """
    if min(n_stages, n_microbatches, chunks_per_stage) < 1:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each and "
            f"{n_microbatches} micro-batches are asked for; there must be at least 1 "
            "of each"
        )
    n_chunks = n_stages * chunks_per_stage
    n_jobs = 3 * n_chunks * n_microbatches
    if n_jobs > _MOST_JOBS:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each and "
            f"{n_microbatches} micro-batches are {n_jobs:,} jobs (F, B and W of each "
            f"chunk and micro-batch); at most {_MOST_JOBS:,} are planned: take fewer "
            "stages or micro-batches"
        )
    if n_chunks > _MOST_CHUNKS:
        raise RequestError(
            f"{n_stages} stages with {chunks_per_stage} chunks each are {n_chunks:,} "
            f"chunks; at most {_MOST_CHUNKS:,} are planned: take fewer stages or chunks"
        )


def listed_chunks(costs: Costs, memory: MemoryModel, n_stages: int) -> int | None:
    """Tell from the lengths of the lists how many chunks a stage they are for.

    >>> listed_chunks(Costs(f=(1.0, 2.0, 2.0, 1.0)), MemoryModel(), n_stages=2)
    2

    None if all are numbers or lists of one entry a stage, which are dealt to any number
    of chunks (a list of links says nothing), or if the longest list has no whole number
    of entries a stage: then the planner names the length that it needs.
    """
    values: list[float | tuple[float, ...] | None]
    values = [costs.f, costs.b, costs.w, costs.optimizer]
    values += [costs.all_gather, costs.reduce_scatter]
    values += [memory.m_b, memory.m_w, memory.m_fixed]
    values += [memory.peak_f, memory.peak_b, memory.peak_w, memory.peak_bw]
    values += [memory.peak_o, memory.m_r]
    lengths = [len(value) for value in values if isinstance(value, tuple)]
    for per_edge in (costs.comm, costs.send_occupies):
        if isinstance(per_edge, tuple) and len(per_edge) > n_stages:
            lengths.append(len(per_edge) + 1)
    longest = max(lengths, default=0)
    if n_stages < 1 or longest % n_stages:
        return None
    chunks_per_stage = longest // n_stages
    return chunks_per_stage if chunks_per_stage > 1 else None
