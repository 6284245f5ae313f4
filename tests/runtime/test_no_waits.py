"""Steps do not wait for the GPU: what reads a device is named here, with a reason.

On CPUs nothing is copied, but the calls are the same, and `SyncWatch` sees them. What
is left reads numbers that are on the host anyway. `tests/gpu` looks once more, by
torch's own ``set_sync_debug_mode("error")``.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from fake_stream import FakeStream
from pool import Pool
from small_model import MODES, batch, build, make_pipeline
from sync_watch import SyncWatch
from torch import Tensor

from zbpp.runtime.comm import transport
from zbpp.runtime.optim import norms
from zbpp.runtime.optim.patience import Patience
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.streams import HostCopy

ON_HOST = {
    "decision.py:StepSums.norm": "the sums have been copied to the host",
    "stage.py:StageTies.difference": "the same sums",
    "stage_optimizer.py:StageOptimizer.reduce": "of CPU tensors only, else left out",
}
BETWEEN_PROCESSES = {
    "messages.py:Messages._listen": "kinds of the micro-batches, copied to the host",
    "messages.py:Messages.send": "gloo sends from the host; with NCCL it is there",
    "messages.py:Messages.receive": "the same on the way back",
    "distributed.py:DistributedTransport.reduce": "the same",
    "streams.py:sent_ahead": "from pinned memory, and the host goes on",
}
MOVES = {
    "loss.py:Loss.table": "losses are where the stage computes",
    "uploads.py:Uploads._moved": "on a GPU copies are begun ahead, see test_uploads",
    "streams.py:sent_ahead": "from pinned memory, and the host goes on",
}
STEPS = 4
COUNTED = 2  # of them the last; with a clip each one is rolled back


def fused(parameters: Any) -> torch.optim.Optimizer:
    """torch's usual AdamW reads its count of steps, which it keeps on the host."""
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def waits(mode: str, n_stages: int | None, **more: object) -> Counter[tuple[str, str]]:
    """The waits of steps once shapes and buffers are known."""
    pipeline = make_pipeline(
        mode,
        n_stages,
        optimizer=fused,
        patience=Patience(failures=11, window=10),
        loss_scale=8.0,
        **more,
    )
    watch = SyncWatch()
    for step in range(STEPS):
        if step < STEPS - COUNTED:
            pipeline.step(*batch(step))
            continue
        with watch:
            pipeline.step(*batch(step))
    pipeline.close()
    return watch.found


def in_processes(mode: str) -> list[tuple[str, str]]:
    return sorted(waits(mode, None, clip_grad_norm=0.5))


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("post_validation", [False, True])
@pytest.mark.parametrize("mode", ["1F1B", "ZBH1", "ZBV"])
def test_nothing_is_waited_for_but_what_is_on_the_host(
    mode: str, post_validation: bool, clip: float | None
) -> None:
    assert mode in MODES
    found = waits(mode, 2, post_validation=post_validation, clip_grad_norm=clip)
    assert {where for where, _ in found} <= (ON_HOST | MOVES).keys()
    assert found["decision.py:StepSums.norm", "_local_scalar_dense"] > 0, "it looks"


def test_nor_where_layers_are_recomputed() -> None:
    model = partial(build, dropout=0.1)
    found = waits("ZBH1", 2, clip_grad_norm=0.5, recompute="all", model=model)
    reasons = {
        "random_state.py:_same": "generators keep their states on the host, CUDA's too"
    }
    assert {where for where, _ in found} <= (ON_HOST | MOVES | reasons).keys()


def test_nor_between_processes(pool: Pool) -> None:
    reasons = ON_HOST | MOVES | BETWEEN_PROCESSES
    for found in pool.run(in_processes, 2, "ZBV"):
        assert {where for where, _ in found} <= reasons.keys()
        assert ("distributed.py:DistributedTransport.reduce", "to") in found, "it looks"


def test_a_read_in_a_job_or_in_the_norms_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, squares = Stage.forward, norms._squares

    def reads(self: Stage, *args: Any) -> Any:
        outputs = forward(self, *args)
        assert float(outputs[0].detach().sum()) < float("inf")
        return outputs

    def moves(every: Sequence[Tensor]) -> list[Tensor]:
        return [square.cpu() for square in squares(every)]

    monkeypatch.setattr(norms, "_squares", moves)
    shown = {what for _, what in waits("ZBH1", 2)}
    assert "cpu" in shown
    monkeypatch.setattr(Stage, "forward", reads)
    found = waits("ZBH1", 2)
    assert found["replay.py:Replay.run", "_local_scalar_dense"] == COUNTED * 6 * 2


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

    monkeypatch.setattr(transport, "HostCopy", note)
    forward = Stage.forward

    def slow(self: Stage, *args: Any) -> Any:
        stream.run(1.0)
        return forward(self, *args)

    monkeypatch.setattr(Stage, "forward", slow)
    pipeline = make_pipeline("ZBH1", 2, patience=Patience(failures=11, window=10))
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
