"""Models of `cases`, by name: eight layers each, seeded one by one.

lm ..        an embedding, blocks and a head, with ties or dropout
dicts        mask, positions and an extra loss travel in a dict; lengths change
the rest     vectors of 8 numbers, and one kind of layer in the middle
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as f
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import zbpp

N_LAYERS, WIDTH, TOKENS = 8, 8, 11
IGNORED = -100
LAST = N_LAYERS - 1

Tie = tuple[tuple[int, str], ...]
"""A layer and the name of a parameter in it, of each place of one parameter."""


def _split(batch: Any, n: int) -> list[Any]:
    """Micro-batches of a batch, in copies."""
    tensors, spec = _pytree.tree_flatten(batch)
    parts = zip(*(x.tensor_split(n) for x in tensors), strict=True)
    return [_pytree.tree_unflatten([x.clone() for x in part], spec) for part in parts]


def _vectors(step: int, samples: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(2, samples, 3, WIDTH, generator=generator)
    return x, y


@dataclass(frozen=True)
class Model:
    """How a model is made and trained.

    Args:
        layer: makes the layer of an index.
        batch: inputs and targets from a step and a number of samples.
        loss_fn: of outputs and targets.
        split: from inputs to those of micro-batches.
        ties: parameters that layers share.
        oracle: what has the same bits: a ``"plain"`` loop, or one ``"stage"`` alone:
            layers draw random numbers, or parameters are tied, whose gradients are
            added layer by layer. ``"close"``: a plain loop, but for rounding: tensors
            are strided or sparse, and sums of copies or entries round otherwise.
    """

    layer: Callable[[int], nn.Module]
    batch: Callable[[int, int], tuple[Any, Tensor]] = _vectors
    loss_fn: Callable[[Any, Tensor], Tensor] = f.mse_loss
    split: Callable[[Any, int], list[Any]] = _split
    ties: tuple[Tie, ...] = ()
    oracle: Literal["plain", "stage", "close"] = "plain"

    def build(self, indices: Sequence[int] = range(N_LAYERS)) -> list[nn.Module]:
        """Make layers, whatever the generator's state, without ties."""
        layers = []
        for index in indices:
            torch.default_generator.manual_seed(index)
            layers.append(self.layer(index))
        return layers

    def layers(self) -> list[nn.Module]:
        """Make all layers, with their ties."""
        layers = self.build()
        for (first, name), *others in self.ties:
            for other, its_name in others:
                setattr(layers[other], its_name, getattr(layers[first], name))
        return layers


# ---- A language model.


class Block(nn.Module):
    """Norm, two Linears, a skip."""

    def __init__(self, width: int = 16, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(f.gelu(self.up(self.norm(x)))))


def _lm_layer(index: int, *, dropout: float = 0.0, sparse: bool = False) -> nn.Module:
    if index == 0:
        return nn.Embedding(TOKENS, 16, sparse=sparse)
    if index == LAST:
        return nn.Linear(16, TOKENS)
    return Block(dropout=dropout)


def _tokens(step: int, samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, TOKENS, (samples, 6), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[:: step + 2, 3:] = IGNORED
    return tokens[:, :-1], targets


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    scores = outputs.flatten(0, 1).float()
    return f.cross_entropy(scores, targets.flatten(), ignore_index=IGNORED)


_lm = partial(Model, batch=_tokens, loss_fn=_cross_entropy)


# ---- Dicts of changing lengths.


class _First(nn.Module):
    """From the batch to what the blocks hand on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        return {
            "hidden": self.embed(batch["input_ids"]),
            "shared": {"mask": batch["mask"], "places": batch["places"]},
            "twice": [batch["mask"], {"rate": 0.5, "name": "x"}],
            "cache": None,
            "router": (self.embed.weight.new_zeros(()),),
        }


class _Masked(nn.Module):
    """Attention that looks at the mask and the places; adds to the extra loss."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        x, mask = value["hidden"], value["shared"]["mask"]
        assert value["cache"] is None and value["twice"][0] is mask
        q = self.query(x)
        distance = (value["shared"]["places"] - value["shared"]["places"].mT).abs()
        scores = q @ x.mT - distance.to(x.dtype)
        scores = scores.masked_fill(~mask[:, None, :], -1e9)
        y = x + self.out(scores.softmax(-1) @ x)
        extra = value["router"][0] + q.square().mean() * value["twice"][1]["rate"]
        return {**value, "hidden": y, "router": (extra,)}


class _Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, value: dict[str, Any]) -> dict[str, Tensor]:
        return {"logits": self.head(value["hidden"]), "extra": value["router"][0]}


def _dict_layer(index: int) -> nn.Module:
    return {0: _First, LAST: _Last}.get(index, _Masked)()


def _padded(step: int, samples: int) -> tuple[dict[str, Tensor], Tensor]:
    """A batch that is padded to its longest sample; its length depends on the step."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 4 + step * 5 % 9, (samples,), generator=generator)
    longest = int(lengths.max())
    ids = torch.randint(0, TOKENS, (samples, longest), generator=generator)
    mask = torch.arange(longest) < lengths[:, None]
    labels = ids.roll(-1, 1).masked_fill(~mask, IGNORED)
    places = torch.arange(longest).repeat(samples, 1, 1)
    return {"input_ids": ids, "mask": mask, "places": places}, labels


def _dict_loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return _cross_entropy(outputs["logits"], labels) + 0.01 * outputs["extra"]


# ---- Vectors.


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class _Function(nn.Module):
    """A Linear, after a function of its input and before another of its output."""

    def __init__(
        self,
        before: Callable[[Any], Any] = lambda value: value,
        after: Callable[[Tensor], Any] = lambda y: y,
    ) -> None:
        super().__init__()
        self.linear, self.before, self.after = _linear(), before, after

    def forward(self, value: Any) -> Any:
        return self.after(self.linear(self.before(value)))


def _used_in_turns(value: dict[str, Tensor]) -> Tensor:
    """One sum of gradients is not that of two sums."""
    x, residual = value["hidden"], value["residual"]
    y = torch.sin(x * 1.3) + torch.cos(residual * 0.7)
    return y + torch.tanh(x * 0.3) + torch.sin(residual * 0.1)


def _expanded(index: int) -> nn.Module:
    """Hands over an expanded tensor next to another one, or reads both."""
    if index % 2 == 0:
        return _Function(after=lambda y: (y, (0.3 * y).expand(3, *y.shape)))
    return _Function(lambda x: x[0] + torch.sin(x[1]).sum(0) + torch.cos(x[1]).sum(0))


class _Norms(nn.Module):
    """Forwards change buffers: running statistics, and a vector of power iterations."""

    def __init__(self) -> None:
        super().__init__()
        self.bounded = spectral_norm(_linear())
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.bounded(x).flatten(0, 1)).view_as(x)


class _Buffers(_Norms):
    """Writes to a buffer, behind its version counter too, or puts another in its place.

    The first is read through a view, so that it must be restored in place.
    """

    def __init__(self, index: int, *, hides: bool = False) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(64, 128))
        self.index, self.row, self.hides = index, self.table[0, :WIDTH], hides

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.index % 2:
            mean = x.detach().float().mean((0, 1))
            table = self.table.data if self.hides else self.table
            table[0, :WIDTH].lerp_(mean, 0.5)
        elif self.training:
            self.table = self.table + 0.1
        row = self.row if self.index % 2 else self.table[0, :WIDTH]
        return super().forward(x + row)


class _Cached(nn.Module):
    """Has a buffer from its first forward on, which is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(WIDTH), persistent=False)
        return self.linear(x + self.cache)


class _Writes(nn.Module):
    """Writes to its weight, as weight clipping does: no version counter sees it."""

    def __init__(self, write: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        self.linear, self.write = _linear(), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.linear.weight)
        return torch.tanh(self.linear(x))


def _writes(write: Callable[[nn.Parameter], object]) -> Model:
    """A model with two layers that write to their weights."""
    return Model(lambda index: _Writes(write) if index in (1, 5) else _linear())


def _changes(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that changes its targets."""
    return f.mse_loss(outputs, targets.mul_(0.5))


def _narrow(step: int, samples: int) -> tuple[Tensor, Tensor]:
    x, y = _vectors(step, samples)
    return x.bfloat16(), y


def _narrow_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return f.mse_loss(outputs.float(), targets)


class _Draws(nn.Module):
    """Draws from the generators of torch, Python and numpy."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = _linear(), index

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.index % 3 == 0:
            return f.dropout(x, 0.3, self.training)
        module = "numpy.random" if self.index % 3 == 1 else "random"
        return x * (0.5 + importlib.import_module(module).random())


class _Complex(nn.Module):
    """A complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).real.contiguous()


def _in_place(index: int) -> nn.Module:
    """Layers that write to their input, in one of several ways."""
    ways: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda x: x.add_(1.0),
        lambda x: x.mul_(1.5),
        torch.relu_,
        lambda x: (x[..., :4].add_(1.0), x)[1],
    )
    return _Function(ways[index % 4])


class _Auxiliary(nn.Module):
    """Adds in place to an extra loss and a counter that travel with the value."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear, self.index = _linear(), index

    def forward(self, value: Any) -> dict[str, Tensor]:
        if self.index == 0:
            count = torch.zeros((), dtype=torch.int64)
            value = {"x": value, "extra": torch.zeros(()), "count": count}
        value["extra"] += value["x"].pow(2).mean()
        value["count"] += 1
        value["x"] = self.linear(value["x"])
        return value


def _auxiliary_loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    extra = outputs["extra"] / outputs["count"]
    return f.mse_loss(outputs["x"], targets) + 0.1 * extra


class Exchange(nn.Module):
    """attention | dispatch | experts | combine, and a skip: two overlap points."""

    def __init__(self, index: int, *, dropout: float = 0.0, norm: Any = None) -> None:
        super().__init__()
        self.norm, self.dropout = (norm or nn.LayerNorm)(WIDTH), nn.Dropout(dropout)
        self.attention, self.experts = _linear(), _linear()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.flatten(0, 1)).view_as(x)
        hidden = torch.tanh(self.attention(normed))
        hidden = zbpp.overlap_point(_flipped, hidden)
        hidden = self.dropout(self.experts(hidden))
        return x + zbpp.overlap_point(_flipped, hidden)


class _Checkpointed(nn.Module):
    """A layer whose forward runs again in the backward, by torch's checkpoint."""

    def __init__(self, index: int, *, use_reentrant: bool) -> None:
        super().__init__()
        self.inner = Exchange(index, dropout=0.3)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return result


def _checkpointed(index: int, **how: bool) -> nn.Module:
    """The first layer gives the input of a reentrant one a gradient."""
    return _Checkpointed(index, **how) if index else _linear()


def _flipped(x: Tensor) -> Tensor:
    return x.sin().flip(1)  # saves x for its backward


class _Reuses(nn.Module):
    """Returns the same memory for every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.memory = _linear(), torch.zeros(2, 3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if len(y) != len(self.memory):
            return y
        self.memory = self.memory.detach_().to(y.dtype).copy_(y)
        return self.memory


def _hooked(index: int) -> nn.Module:
    """Layers that halve the gradient of their input, by a hook on it."""

    def hook(x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda dx: dx / 2)
        return x

    return _Function(hook) if index % 2 else _linear()


def _written_mask(index: int) -> nn.Module:
    """The batch's mask is handed on by all layers; one writes to it."""

    def read(value: dict[str, Tensor]) -> Tensor:
        if index == 3:
            value["mask"].mul_(0.5)
        return value["x"] + value["mask"]

    class Masks(_Function):
        def forward(self, value: Any) -> Any:
            y = super().forward(value)
            return y if index == LAST else {"x": y, "mask": value["mask"]}

    return Masks(read)


def _masked_batch(step: int, samples: int) -> tuple[Any, Tensor]:
    x, y = _vectors(step, samples)
    return {"x": x, "mask": (x > 0).float()}, y


def _frozen(index: int) -> nn.Module:
    return _linear().requires_grad_(index not in (0, 1, 5))


def _twice(index: int) -> nn.Module:
    if index in (1, 4):
        return _Function(after=lambda y: {"hidden": y, "residual": y})
    return _Function(_used_in_turns) if index in (2, 5) else _linear()


def _tuples(index: int) -> nn.Module:
    """Tuples of one, then tuples with a tensor that needs no gradient and integers."""
    if index in (1, 2):
        return _Function(_only, lambda y: (y.tanh(),))
    if index == 0:
        return _Function(after=lambda y: (y.tanh(),))
    if index == 3:
        return _Function(_only)
    if index == 5:
        return _Function(after=lambda y: (y, y.detach() * 2, torch.arange(len(y))))
    if index == 6:
        return _Function(lambda x: x[0] + x[1], lambda y: (y, y.sin()))
    return _Function(lambda x: x[0] * x[1]) if index == 7 else _linear()


def _only(value: Any) -> Tensor:
    assert type(value) is tuple and len(value) == 1, value
    return value[0]


_ENDS = ((0, "weight"), (LAST, "weight"))


class _Counts(nn.Linear):
    """Counts its forwards in one buffer, and has another one that is not saved."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x + torch.tanh(super().forward(x))


def _doubles(step: int, samples: int) -> tuple[Tensor, Tensor]:
    """Targets of every second step are near what the first layers put out."""
    x, y = (part.double() for part in _vectors(step, samples))
    return x, (0.2 * y + x if step % 2 else y)


MODELS: dict[str, Model] = {
    "lm": _lm(_lm_layer),
    "lm tied": _lm(_lm_layer, ties=(_ENDS,), oracle="stage"),
    "tied thrice": Model(
        lambda index: _linear(), ties=((*_ENDS, (4, "weight")),), oracle="stage"
    ),
    "lm dropout": _lm(partial(_lm_layer, dropout=0.3), oracle="stage"),
    "lm sparse": _lm(partial(_lm_layer, sparse=True), oracle="close"),
    "dicts": Model(_dict_layer, batch=_padded, loss_fn=_dict_loss),
    "vectors": Model(lambda index: nn.Sequential(_linear(), nn.Tanh())),
    "twice": Model(_twice),
    "expanded": Model(_expanded, oracle="close"),
    "tuples": Model(_tuples),
    "norms": Model(lambda index: _Norms() if index % 2 else _linear()),
    "buffers": Model(lambda index: _Buffers(index) if index in (1, 4) else _linear()),
    "buffers by data": Model(partial(_Buffers, hides=True)),
    "in place": Model(_in_place),
    "auxiliary loss": Model(_Auxiliary, loss_fn=_auxiliary_loss),
    "frozen": Model(_frozen),
    "draws": Model(_Draws, oracle="stage"),
    "complex": Model(lambda index: _Complex() if index % 4 == 1 else _linear()),
    "hooks": Model(_hooked),
    "reused memory": Model(lambda index: _Reuses() if index == 3 else _linear()),
    "written mask": Model(_written_mask, batch=_masked_batch),
    "exchange": Model(Exchange),
    "exchange, dropout": Model(partial(Exchange, dropout=0.3), oracle="stage"),
    "checkpoints": Model(partial(_checkpointed, use_reentrant=False), oracle="stage"),
    "reentrant checkpoints": Model(
        partial(_checkpointed, use_reentrant=True), oracle="stage"
    ),
    "counts, tied": Model(lambda index: _Counts(), batch=_doubles, ties=(_ENDS,)),
    "16 bits": Model(
        lambda index: nn.Sequential(_linear(), nn.Tanh()).bfloat16(),
        batch=_narrow,
        loss_fn=_narrow_loss,
    ),
    "cached": Model(lambda index: _Cached() if index in (1, 5) else _linear()),
    "changed targets": Model(lambda index: _linear(), loss_fn=_changes),
    "clamped weights": _writes(lambda weight: weight.data.clamp_(-0.2, 0.2)),
    "replaced weights": _writes(
        lambda weight: setattr(weight, "data", weight.data.clamp(-0.2, 0.2))
    ),
    "shrunk weights": _writes(lambda weight: weight.data.mul_(0.99)),
    "exchange, norms": Model(partial(Exchange, norm=nn.BatchNorm1d)),
}
