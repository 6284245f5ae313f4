"""Gradients of a zoo module: by one backward, and by B and W in any order."""

import torch
from torch import Tensor, nn
from zoo import Case

from zbpp.runtime.chunk import Chunk
from zbpp.runtime.stage import Stage
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.values import Tensors, as_value, gradients_in

ORDERS = {
    "one by one": "F0 B0 W0 F1 B1 W1 F2 B2 W2",
    "interleaved": "F0 F1 B0 F2 B1 W0 F3 B2 B3 W1 W2 W3",
    "W out of order": "F0 F1 F2 B0 B1 B2 W2 W0 W1",
    "B out of order": "F0 F1 F2 B2 B0 W2 B1 W1 W0",
}
Gradients = dict[str, list[Tensor]]


def inputs_of(case: Case, i: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    def prepare(x: Tensor) -> Tensor:
        return x.to(dtype).requires_grad_() if x.is_floating_point() else x

    return tuple(prepare(x.clone()) for x in case.inputs(i))


def gradient_of(y: Tensor, i: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + i)
    return torch.randn(y.shape, generator=generator).to(y.dtype)


def gradients_for(outputs: Tensors, i: int) -> Tensors:
    """One gradient for each tensor, whose places in the outputs have one each."""
    places = tensors_in(as_value(outputs))
    return tuple(
        sum(gradient_of(x, i) for x in places if x is y)
        for y in outputs
        if y.requires_grad
    )


def call(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    result = module(inputs[0] if len(inputs) == 1 else inputs)
    return result if isinstance(result, tuple) else (result,)


def plainly(case: Case, module: nn.Module, n: int, dtype: torch.dtype) -> Gradients:
    """One ``backward()`` for each micro-batch, in order."""
    found = {}
    for i in range(n):
        torch.default_generator.manual_seed(i)
        inputs = inputs_of(case, i, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
            outputs = [y for y in call(module, inputs) if y.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [gradient_of(y, i) for y in outputs])
        found[f"inputs {i}"] = [
            torch.zeros_like(x) if x.grad is None else x.grad
            for x in inputs
            if x.requires_grad
        ]
    return found | gradients_of(module)


def gradients_of(module: nn.Module) -> Gradients:
    return {
        name: [] if p.grad is None else [p.grad]
        for name, p in module.named_parameters()
    }


def split(
    case: Case,
    module: nn.Module,
    order: str,
    dtype: torch.dtype,
    *,
    exact_sums: bool = True,
) -> Gradients:
    """The same by a stage that holds the middle chunk of three."""
    stage = Stage(
        [Chunk(1, 1, (module,))], n_chunks=3, loss_fn=lambda *_: torch.zeros(()),
        device=torch.device("cpu"), autocast=torch.bfloat16 if case.autocast else None,
        exact_sums=exact_sums,
    )  # fmt: skip
    stage.random.seed_layer = (  # type: ignore[method-assign]
        lambda step, number, layer: torch.default_generator.manual_seed(number)
    )
    passes = [(text[0], int(text[1:])) for text in order.split()]
    outputs: dict[int, Tensors] = {}
    found = {}
    for kind, i in passes:
        if kind == "F":
            outputs[i] = stage.forward(1, i, inputs_of(case, i, dtype))
        elif kind == "B":
            dy = gradients_for(outputs.pop(i), i)
            found[f"inputs {i}"] = [
                torch.zeros_like(x) if dx is None else dx
                for x, dx in zip(
                    [x for x in inputs_of(case, i, dtype) if x.requires_grad],
                    gradients_in(stage.backward_input(1, i, dy)),
                    strict=True,
                )
            ]
        else:
            stage.backward_weight(1, i)
    stage.assert_empty()
    return found | gradients_of(module)


def differences(left: Gradients, right: Gradients) -> list[str]:
    assert left.keys() == right.keys()
    return [
        name
        for name in left
        if len(left[name]) != len(right[name])
        or not all(map(torch.equal, left[name], right[name]))
    ]
