"""A fixture of the rooms whose tests compare bits."""

from collections.abc import Iterator

import pytest
import torch

__all__ = ["one_thread"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums have the same order everywhere only with the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
