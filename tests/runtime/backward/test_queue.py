"""Work between B and W waits in the queue of the pass that runs."""

from zbpp.runtime.backward.queue import WeightQueue, current_queue


def test_a_pass_within_a_pass_has_a_queue_of_its_own() -> None:
    outer, inner = WeightQueue(), WeightQueue()
    with outer:
        with inner:
            assert current_queue() is inner
        assert current_queue() is outer
    assert current_queue() is None
