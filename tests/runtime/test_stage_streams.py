"""Stages that share a GPU: each computes on its own stream, and waits for values."""

import pytest
from fake_stream import FakeStageStream
from small_model import assert_same, batch, build, make_pipeline
from torch import nn

from zbpp.pipeline import Pipeline


def on_streams(mode: str, n_stages: int) -> tuple[Pipeline, list[tuple[object, ...]]]:
    """A pipeline whose stages have fake streams, and the log of these."""
    log: list[tuple[object, ...]] = []
    pipeline = make_pipeline(mode, n_stages, clip_grad_norm=0.5)
    for number, executor in pipeline._executors.items():
        stream = FakeStageStream(number, log)
        executor.stream = executor.transport.stream = stream
        for _, layer in executor.stage.numbered():
            layer.register_forward_pre_hook(ran_on(number))
    return pipeline, log


def ran_on(stage: int) -> object:
    def look(layer: nn.Module, inputs: object) -> None:
        assert FakeStageStream.current == stage, f"a layer of stage {stage}"

    return look


@pytest.mark.parametrize(("mode", "n_stages"), [("1F1B", 2), ("ZBV", 4)])
def test_values_are_taken_over_from_the_stage_that_made_them(
    mode: str, n_stages: int
) -> None:
    plain = make_pipeline(mode, n_stages, clip_grad_norm=0.5)
    pipeline, log = on_streams(mode, n_stages)
    for step in range(3):
        ours, theirs = (one.step(*batch(step)) for one in (pipeline, plain))
        assert (ours.loss, ours.grad_norm) == (theirs.loss, theirs.grad_norm)
    assert_same(
        *(dict(one.named_parameters()) for one in (pipeline, plain))  # type: ignore[arg-type]
    )
    begun = [("fork", stage) for stage in range(n_stages)]
    assert log[:n_stages] == begun
    assert log[-n_stages:] == [("join", stage) for stage in range(n_stages)]
    taken = [entry for entry in log if entry[0] == "take"]
    hops = {(entry[1], entry[2]) for entry in taken}
    assert hops == {(s, t) for s in range(n_stages) for t in (s - 1, s + 1)} & {
        (s, t) for s in range(n_stages) for t in range(n_stages)
    }
    assert all(entry[3] == 1 for entry in taken)


def test_a_layer_that_runs_elsewhere_shows() -> None:
    pipeline, _ = on_streams("1F1B", 2)
    for executor in pipeline._executors.values():
        executor.stream = None  # the control
    with pytest.raises(AssertionError, match=r"a layer of stage 0|elsewhere"):
        pipeline.step(*batch(0))


def test_on_a_cpu_the_option_changes_nothing() -> None:
    pipeline = make_pipeline("ZBH1", 2, model=build, stage_streams=True)
    assert all(one.stream is None for one in pipeline._executors.values())
