"""A write between a speculative step and its validation is noticed and named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_model import batch, make_pipeline

from zbpp.core import RequestError

Write = Callable[[dict[str, torch.nn.Parameter], Any], object]


def clamp(parameters: dict[str, torch.nn.Parameter], _: Any) -> None:
    with torch.no_grad():
        parameters["layers.2.up.weight"].clamp_(-0.1, 0.1)


def other_memory(parameters: dict[str, torch.nn.Parameter], _: Any) -> None:
    p = parameters["layers.2.up.weight"]
    p.data = p.data.clone()


def moments_set_to_zero(
    parameters: dict[str, torch.nn.Parameter], pipeline: Any
) -> Any:
    state = pipeline.stages.executors[0].optimizer.optimizers.all[0].state
    state[parameters["layers.2.up.weight"]]["exp_avg"].zero_()


WRITES = {
    clamp: "layers.2.up.weight changed after",
    other_memory: "layers.2.up.weight changed after",
    moments_set_to_zero: r"layers.2.up.weight \(exp_avg in AdamW\) changed after",
}


def stepped() -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """The second step is speculative, and not validated yet."""
    pipeline = make_pipeline("ZBH1", 2, post_validation=True)
    parameters = dict(pipeline.named_parameters())
    for step in range(2):
        pipeline.step(*batch(step))
    return pipeline, parameters


@pytest.mark.parametrize(
    ("write", "then"),
    list(zip(WRITES, ("step", "synchronize", "state_dict"), strict=True)),
)
def test_it_is_named(write: Write, then: str) -> None:
    pipeline, parameters = stepped()
    write(parameters, pipeline)
    with pytest.raises(RequestError, match=WRITES[write]) as caught:
        if then == "step":
            pipeline.step(*batch(2))
        elif then == "synchronize":
            pipeline.synchronize()
        else:
            pipeline.optimizers[0].state_dict()
    assert "call pipeline.synchronize() before you write" in str(caught.value)


@pytest.mark.parametrize("write", WRITES)
def test_after_synchronize_it_is_allowed(write: Write) -> None:
    pipeline, parameters = stepped()
    pipeline.synchronize()
    write(parameters, pipeline)
    pipeline.step(*batch(2))
    pipeline.close()


def test_a_layer_that_writes_to_its_own_weight_is_none_of_it() -> None:
    """A replay does so again."""
    pipeline = make_pipeline("ZBH1", 2, post_validation=True, clip_grad_norm=0.1)
    layer = dict(pipeline.named_layers())["layers.2"]

    def bound(module: Any, _: Any) -> None:
        with torch.no_grad():
            module.up.weight.data = module.up.weight.data.clamp(-0.2, 0.2)

    layer.register_forward_pre_hook(bound)
    results = [pipeline.step(*batch(step)) for step in range(3)]
    pipeline.close()
    assert sum(result.rollbacks for result in results) == 3
