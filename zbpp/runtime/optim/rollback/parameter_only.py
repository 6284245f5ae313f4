"""Step Adam's parameters and leave its state as it is, to the optimizer's own bits.

    optimizer.step()   reads p, g, m, v   writes p, m, v
    ParameterStep      reads p, g, m, v   writes p

With this a speculative step copies nothing. torch has no such kernel; `adam_kernel`
makes one. Its last bits depend on the products and sums that each compiler has fused,
so both step many numbers first, and where one bit differs there is no such step.
"""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zbpp.runtime.optim.rollback.adam_kernel import (
    NoKernel,
    adam_kernel,
    adam_numbers,
    is_coupled,
)
from zbpp.runtime.optim.rollback.buckets import ROW, Piece
from zbpp.runtime.optim.rollback.copies import State
from zbpp.runtime.support.torch_internals import plain_step

__all__ = ["ParameterStep", "bits_of"]

_ALIGNED_BYTES = 64
_SMALLEST = 2**14  # numbers; with fewer, a call takes longer than copies would
_SAMPLES = 2**18
_OTHERS = ("amsgrad", "maximize", "capturable", "differentiable")

Values = Mapping[str, Any]
"""Of a parameter group: learning rate, betas, ..."""


class ParameterStep:
    """Steps parameters of one optimizer: `begin`, then `step` what it `takes`.

    Args:
        optimizer: Adam or AdamW, ``fused=True``.

    Raises:
        NoKernel: it is another optimizer, nothing can be compiled here, or the
            compiled step is not the optimizer's to the last bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer)
        if kind not in (torch.optim.Adam, torch.optim.AdamW):
            raise NoKernel(f"{kind.__name__} is neither torch's Adam nor AdamW")
        self._optimizer = optimizer
        self._groups: list[_Group] = []
        self._views: dict[Tensor, _Views] = {}
        self._counts: dict[Tensor, float] = {}
        self._known: set[tuple[object, ...]] = set()
        for values in optimizer.param_groups:
            formula = _formula(values)
            for parameter in values["params"] if formula is not None else ():
                place = (parameter.device, parameter.dtype, formula)
                if place not in self._known and parameter.is_floating_point():
                    _compare(kind, values, *place[:2])
                    self._known.add(place)
        if not self._known:
            raise NoKernel(
                f"no parameter group of {kind.__name__} is stepped with fused=True and "
                f"without {', '.join(_OTHERS)}"
            )

    def begin(self, values: Sequence[Values]) -> None:
        """Begin a step with these values of the parameter groups."""
        self._groups = [_Group(own) for own in values]

    def takes(self, piece: Piece) -> bool:
        """True if it can step this part of a parameter."""
        parameter, gradient = piece.parameter, piece.gradient
        if parameter.numel() < _SMALLEST or not _is_like(gradient, parameter):
            return False
        formula = self._groups[piece.group].formula
        if (parameter.device, parameter.dtype, formula) not in self._known:
            return False
        state = piece.state_in(self._optimizer.state)
        if not state:
            return False
        views = self._views.get(parameter)
        if views is None or not views.are_of(parameter, state):
            if not all(_is_like(t, parameter) for t in _moments(state)):
                return False
            self._views[parameter] = _Views(parameter, state)
        return True

    @torch.no_grad()
    def step(self, piece: Piece) -> Piece | None:
        """Step a whole parameter that it `takes`, up to a rest of less than a row.

        Returns:
            The rest, which is not stepped.
        """
        parameter = piece.parameter
        views = self._views[parameter]
        views.step(piece.gradient, self._groups[piece.group], self._count(piece))
        n_stepped = views.p.numel()
        if n_stepped == parameter.numel():
            return None
        return replace(piece, cut=slice(n_stepped, parameter.numel()))

    def counted(self, parameter: Tensor) -> None:
        """The state of a parameter has been stepped by its optimizer."""
        if parameter in self._counts:
            self._counts[parameter] += 1

    def forget(self) -> None:
        """Others may write to the state now, or replace it."""
        self._counts = {}
        self._views = {}

    def _count(self, piece: Piece) -> float:
        """Steps so far; a GPU is asked once only."""
        parameter = piece.parameter
        count = piece.state_in(self._optimizer.state)["step"]
        if count.device.type == "cpu":
            return float(count)
        if parameter not in self._counts:
            self._counts[parameter] = float(count)
        return self._counts[parameter]


class _Group:
    """The values of a parameter group during one step."""

    def __init__(self, values: Values) -> None:
        self.values = values
        self.formula = _formula(values)
        self._numbers: dict[tuple[object, ...], Tensor] = {}

    def numbers(self, count: float, like: Tensor) -> Tensor:
        """See `adam_numbers`; made once for all parameters that share them."""
        key = (count, like.dtype, like.device)
        if key not in self._numbers:
            self._numbers[key] = adam_numbers(self.values, count, like)
        return self._numbers[key]


class _Views:
    """A parameter and its state in whole rows."""

    def __init__(self, parameter: Tensor, state: State) -> None:
        self._address = parameter.data_ptr()
        self._moments = _moments(state)
        self.p, self._m, self._v = map(_rows, (parameter, *self._moments))

    def are_of(self, parameter: Tensor, state: State) -> bool:
        """True if neither has been replaced."""
        return parameter.data_ptr() == self._address and all(
            map(operator.is_, _moments(state), self._moments)
        )

    def step(self, gradient: Tensor, group: _Group, count: float) -> None:
        """Step the parameter."""
        kernel = adam_kernel(self.p.device, self.p.dtype, group.values)
        numbers = group.numbers(count, self.p)
        kernel(self.p, _rows(gradient), self._m, self._v, numbers)


def _formula(values: Values) -> tuple[object, ...] | None:
    """The values that the bits depend on and that last; None: there is no kernel."""
    if not values.get("fused") or any(values.get(name) for name in _OTHERS):
        return None
    if isinstance(values["lr"], Tensor):
        return None
    return is_coupled(values), values["betas"], values["eps"]


def _moments(state: State) -> tuple[Tensor, Tensor]:
    return state["exp_avg"], state["exp_avg_sq"]


def _rows(tensor: Tensor) -> Tensor:
    shape = (tensor.numel() // ROW, ROW)
    return tensor.detach().as_strided(shape, (ROW, 1))


def _is_like(tensor: Tensor, parameter: Tensor) -> bool:
    return (
        tensor.is_contiguous()
        and tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
        and tensor.numel() == parameter.numel()
        and tensor.data_ptr() % _ALIGNED_BYTES == 0
        and type(parameter) in (Tensor, nn.Parameter)
    )


@torch.no_grad()
def _compare(
    kind: Any, group: Values, device: torch.device, dtype: torch.dtype
) -> None:
    """Step the same numbers in both ways, at different times of a run.

    Raises:
        NoKernel: a bit differs, or the step cannot be compiled.
    """
    for finest in {dtype, torch.float32}:  # bf16 alone would hide most differences
        before, g, m, v = _samples(device, finest)
        for count in (0.0, 7.0, 3000.0):
            p = before.clone()
            values = {**group, "lr": 1e-3 / (1 + count), "params": [p.clone()]}
            parameter = values["params"][0]
            parameter.grad = g
            own = kind([values])
            own.state[parameter] = {
                "step": torch.tensor(count, device=device),
                "exp_avg": m.clone(),
                "exp_avg_sq": v.clone(),
            }
            plain_step(own)
            views = _Views(p, {"exp_avg": m, "exp_avg_sq": v})
            views.step(g, _Group(values), count)
            n_other = int((bits_of(p) != bits_of(parameter)).sum())
            if n_other:
                raise NoKernel(
                    f"its compiled step differs from that of {kind.__name__}(fused="
                    f"True) for {finest} on {device.type}, in {n_other} of {len(p)} "
                    "numbers"
                )


def _samples(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """p, g, m and v (not negative) of many sizes, with zeros of both signs."""
    generator = torch.Generator().manual_seed(0)

    def draw(smallest: float, largest: float) -> Tensor:
        sizes = torch.rand(_SAMPLES, generator=generator, dtype=torch.float64)
        sign = torch.rand(_SAMPLES, generator=generator).sub_(0.5).sign_()
        numbers = sign * 10 ** (smallest + (largest - smallest) * sizes)
        numbers[torch.rand(_SAMPLES, generator=generator) < 0.03] *= 0
        return numbers.to(device, dtype)

    return draw(-7, 1), draw(-9, 2), draw(-9, 2), draw(-14, 3).abs_()


def bits_of(tensor: Tensor) -> Tensor:
    """The numbers as integers: NaN equals NaN, and +0 is not -0."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().view(sizes[tensor.element_size()])
