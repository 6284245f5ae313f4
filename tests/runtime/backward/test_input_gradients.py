"""B returns the gradients of its inputs, and leaves theirs as they were."""

import torch

from zbpp.runtime.backward.split import SplitGraph


def test_a_gradient_that_an_input_has_is_neither_changed_nor_added_to() -> None:
    layer = torch.nn.Linear(2, 3)
    fresh = torch.ones(4, 2, requires_grad=True)
    used = torch.ones(4, 2, requires_grad=True)
    before = torch.full((4, 2), 7.0)
    used.grad = before
    graph = SplitGraph([layer(fresh + used)], [fresh, used])
    results = graph.backward_input(torch.ones(4, 3))
    expected = torch.ones(4, 3) @ layer.weight
    assert all(torch.equal(result, expected) for result in results)
    assert fresh.grad is None
    assert used.grad is before and bool((before == 7.0).all())
