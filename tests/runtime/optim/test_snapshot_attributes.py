"""An optimizer's own attributes are part of what a rolled back step puts back."""

import torch
from torch import nn

from zbpp.runtime.optim.rollback import SnapshotStep


class Counting(torch.optim.SGD):
    """Counts its steps in itself: a number, and a tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.calls = 0
        self.seen = torch.zeros(())

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        self.calls += 1
        self.seen += 1
        super().step()


def test_attributes_are_rolled_back_too() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Counting([parameter])
    rollback = SnapshotStep(optimizer)
    parameter.grad = torch.ones(3)
    rollback.take()
    assert (optimizer.calls, float(optimizer.seen)) == (1, 1.0)
    rollback.undo()
    assert (optimizer.calls, float(optimizer.seen)) == (0, 0.0)
    assert parameter.tolist() == [1.0, 1.0, 1.0]
