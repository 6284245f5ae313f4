"""Sizes of pipelines that are planned."""

from zbpp.core import RequestError

__all__ = ["check_sizes"]

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
