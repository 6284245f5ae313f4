"""The error of a run out of memory says what was held and what would need less."""

import pytest
import torch
from small_model import batch, build, make_pipeline
from torch import Tensor, nn

from zbpp.core import Costs, Placement, format_bytes
from zbpp.pipeline.exhausted import Room, explain, largest_that_fits
from zbpp.planning import plan
from zbpp.planning.search import Problem
from zbpp.profiling.memory import Held, is_out_of_memory
from zbpp.runtime.support.fault_injection import Fault
from zbpp.simulator import peak_memory, simulate

CPU = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 99999999999999 bytes. Error code 12"
)


class Hungry(nn.Module):
    """Asks for more than there is, in its third forward."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.n, self.error = 0, error

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        if self.n == 3:
            raise self.error
        return x


def notes_of(error: Exception, mode: str = "ZBH2", **more: object) -> str:
    def model(layers: range) -> list[nn.Module]:
        built = build(layers)
        return (
            [nn.Sequential(Hungry(error), built[0]), *built[1:]]
            if 0 in layers
            else built
        )

    pipeline = make_pipeline(mode, 3, model=model, **more)
    with pytest.raises(type(error)) as caught:
        pipeline.step(*batch(0))
    return "\n".join(caught.value.__notes__)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError(CPU)]
)
def test_the_error_names_what_is_held_and_what_needs_less(error: Exception) -> None:
    notes = notes_of(error)
    assert "in 0F2" in notes
    assert "stage 0 " in notes and "2 forward(s) in flight" in notes
    parameters = sum(p.nbytes for layer in build(range(3)) for p in layer.parameters())
    assert f"parameters {format_bytes(parameters)}" in notes
    assert "ZBH2 keeps 5 forwards in flight here; less memory need" in notes
    assert (
        "ZBH1 (at most 3 forwards in flight)" in notes
        and "smaller micro-batches" in notes
    )
    assert "estimated" not in notes, "the memory model is in units of its own"


def test_a_memory_model_in_bytes_gives_the_estimate_beside_it() -> None:
    memory = Costs(m_b=3 * 2.0**20, m_w=2.0**20, m_fixed=2.0**30, memory_unit="bytes")
    notes = notes_of(torch.OutOfMemoryError("no"), "1F1B", memory=memory)
    assert "estimated for 1F1B: stage 0 1.01 GiB" in notes


MIB = 2.0**20


def test_a_smaller_micro_batch_that_fits_is_told() -> None:
    memory = Costs(
        m_b=30 * MIB,
        m_w=15 * MIB,
        m_fixed=30 * MIB,
        limit=100 * MIB,
        memory_unit="bytes",
    )
    schedule = plan("ZBH2", n_stages=3, n_microbatches=6)
    assert largest_that_fits(schedule, memory, 1e12, 8) == 8
    assert largest_that_fits(schedule, memory, 31 * MIB, 8) == 0
    most = largest_that_fits(schedule, memory, 100 * MIB, 8)
    peak = max(peak_memory(simulate(schedule), memory)) - 30 * MIB
    assert peak * most / 8 <= 70 * MIB < peak * (most + 1) / 8
    held = [Held(0, 100, 100, 200, 0, 2400.0, 2, exact=True)]
    text = explain(held, schedule, memory, room=Room(100 * MIB, 8))
    assert f"100 MiB fit ZBH2 with micro-batches of {most} of its 8 samples" in text
    assert "fit ZBH2" not in explain(held, schedule, memory, room=Room(31 * MIB, 8))


def test_nothing_is_planned_while_other_stages_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = plan("ZBH2", n_stages=3, n_microbatches=6)

    monkeypatch.setattr(Problem, "plan", None)  # it would be an error to call it
    memory = Costs(m_b=30 * MIB, m_w=15 * MIB, m_fixed=30 * MIB, memory_unit="bytes")
    held = [Held(0, 100, 100, 200, 0, 2400.0, 2, exact=True)]
    text = explain(held, schedule, memory, room=Room(100 * MIB, 8))
    assert "VMin (at most 2 forwards in flight" in text


def test_an_error_tells_what_fits_the_limit() -> None:
    memory = Costs(
        m_b=30 * MIB,
        m_w=15 * MIB,
        m_fixed=30 * MIB,
        limit=200 * MIB,
        memory_unit="bytes",
    )
    notes = notes_of(torch.OutOfMemoryError("no"), "1F1B", memory=memory)
    assert "by the estimate 200 MiB fit 1F1B" not in notes, "it was planned to fit"
    assert "estimated for 1F1B: stage 0 120 MiB" in notes


def test_other_errors_are_left_alone() -> None:
    notes = notes_of(RuntimeError("shapes differ"))
    assert "in 0F2" in notes and "memory" not in notes
    assert not is_out_of_memory(ValueError("out of memory"))
    assert is_out_of_memory(MemoryError())


def test_on_a_gpu_what_each_forward_takes_is_told() -> None:
    held = Held(1, 100, 100, 200, 0, 2400.0, 2, exact=True)
    assert held.each == 1000.0
    schedule = plan("ZBH2", n_stages=3, n_microbatches=6)
    text = explain([held], schedule)
    assert "2 forward(s) in flight of 1000 B each" in text
    assert "about " in text
    assert schedule.placement == Placement.single(3)


def test_a_fault_on_demand_raises_it() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="ZBPP_FAULT"):
        Fault("memory", 0, 1, "0F0").inject(0, 1, "0F0")
