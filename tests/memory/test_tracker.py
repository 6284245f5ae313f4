"""The tracker of storages by itself; with models in `test_layers.py`."""

import pytest
import torch

from zbpp.memory.tracker import StorageTracker


@pytest.mark.parametrize(
    ("granularity", "large", "small"), [(512, 1024, 512), (1, 516, 4)]
)
def test_a_storage_takes_whole_blocks_while_it_lives(granularity, large, small):
    with StorageTracker(granularity=granularity) as tracker:
        x = torch.ones(129)
        assert tracker.held == large
        y = x.new_ones(1)
        alias = y.view(1, 1)
        assert tracker.held == large + small
        del x
        assert tracker.held == small
        del y
        assert tracker.held == small
        del alias
    assert tracker.held == 0
