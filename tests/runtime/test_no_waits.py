"""`V` waits for what was copied at `O`, and for nothing that was issued since.

That steps wait for nothing else is tested on the simulated GPU, in `tests/simgpu`.
"""

from typing import Any

import pytest
import torch
from fake_stream import FakeStream
from small_model import batch, make_pipeline
from torch import Tensor

from zbpp.runtime.comm import local
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.streams import HostCopy


@pytest.mark.parametrize("is_late", [False, True])
def test_v_waits_for_the_step_before_and_not_for_the_forwards_since(
    is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    host     F F .. O | F F V            V reads what was copied at O
    stream   F F .. sum copy F F ..
    """
    stream = FakeStream()
    copied_s: list[float] = []

    class Late(HostCopy):
        """The control: copied when it is read."""

        def read(self) -> Tensor:
            self._event = self._event and stream.recorded()
            return super().read()

    def note(vector: Tensor) -> HostCopy:
        copied_s.append(stream.now_s)
        return (Late if is_late else HostCopy)(vector, make_event=stream.event)

    monkeypatch.setattr(local, "HostCopy", note)
    forward = Stage.forward

    def slow(self: Stage, *args: Any) -> Any:
        stream.run(1.0)
        return forward(self, *args)

    monkeypatch.setattr(Stage, "forward", slow)
    pipeline = make_pipeline("ZBH1", 2, post_validation=True)
    for step in range(3):
        pipeline.step(*batch(step))
        assert stream.n_waits == 2 * step, "V alone waits, for the sum of each stage"
        if step > 0:
            forwards_s = stream.passed_s - copied_s[2 * step - 1]
            assert (forwards_s > 0) == is_late


def test_a_copy_is_there_when_its_event_is_passed() -> None:
    stream = FakeStream()
    x = torch.ones(2)
    stream.run(1.0)
    copy = HostCopy(x, make_event=stream.event)
    stream.run(5.0)
    assert not copy.done()
    assert copy.read().tolist() == [1.0, 1.0] and stream.passed_s == 101.0
    assert copy.done() and copy.read() is copy.read()
    on_cpu = HostCopy(x)
    assert on_cpu.done() and on_cpu.read() is x
