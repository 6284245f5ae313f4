"""Fixtures of the profiler's tests."""

from collections.abc import Iterator

import pytest
import torch
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for distributed tests."""
    workers = Pool()
    yield workers
    workers.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums have the same order everywhere only with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
