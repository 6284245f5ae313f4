"""Models of transformers as layers: the model's own forward around other blocks.

    front   the forward up to its first block
    block   one of the model's blocks, with the arguments that the forward gives it
    back    the forward from ``inputs_embeds`` on, with the last hidden state after it

The arguments of a block (masks, rotary tables) follow from the batch, so the batch
travels with the hidden state and nothing else does. Each process computes the arguments
once for each micro-batch, by a forward without weights. Nothing is traced, and no
forward is written again: masks, the head and the loss are the model's own code.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbpp.core import RequestError
from zbpp.models.blocks import find_blocks, is_under, modules_above
from zbpp.models.hugging_face import initialiser_of, losses_of
from zbpp.models.layered import Layered, shared_buffers
from zbpp.models.weights import Source, Weights
from zbpp.runtime.support.collectives import groups_kept
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.random_state import random_state, set_random_state
from zbpp.runtime.support.torch_internals import is_fake
from zbpp.runtime.ties.plan import find_ties

__all__ = ["cut_pretrained", "takes_embeddings"]

Value = dict[str, Any]
"""The value between two layers: ``hidden``, a tensor, and ``batch``, a dict."""

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block after the hidden state, and keywords."""

Handler = Callable[[int, Tensor, Call], Tensor]
"""Called in place of a block with its index, hidden state and arguments."""

_OFF = ("use_cache", "output_hidden_states", "output_attentions")

_FAILS = (
    *(AttributeError, IndexError, KeyError),
    *(RuntimeError, TypeError, ValueError),
)
"""Errors of a model's code; `NotImplementedError` is one of them."""


def takes_embeddings(model: Any) -> bool:
    """True if a forward may start from embeddings, with one list of blocks."""
    return "inputs_embeds" in inspect.signature(model.forward).parameters and not (
        getattr(model.config, "is_encoder_decoder", False)
    )


# ---- The forward around other blocks.


class _Stop(BaseException):
    """Ends a forward whose rest is not needed."""


class _Slot(nn.Module):
    """Stands for a block, with its attributes: models ask blocks for their kind."""

    def __init__(self, block: nn.Module, index: int, skeleton: "_Skeleton") -> None:
        super().__init__()
        self.__dict__.update(_block=block, _index=index, _skeleton=skeleton)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Let the handler of the forward that runs take the place of the block."""
        skeleton: _Skeleton = self.__dict__["_skeleton"]
        if not args or not isinstance(args[0], Tensor):
            raise RequestError(
                f"block {self.__dict__['_index']} is called without a hidden state as "
                "its first argument"
            )
        assert skeleton.handler is not None
        call = args[1:], kwargs
        hidden = skeleton.handler(self.__dict__["_index"], args[0], call)
        return (hidden,) if skeleton.returns_tuples else hidden


class _Elsewhere(nn.Module):
    """Stands for a module that only the first layer has; puts out NaN.

    So nothing can use it without being seen.
    """

    def __init__(self, module: nn.Module, skeleton: "_Skeleton") -> None:
        super().__init__()
        self.__dict__.update(_module=module, _skeleton=skeleton)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_module"], name)

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """Return NaN of the hidden state's shape."""
        like: Tensor = self.__dict__["_skeleton"].hidden
        return torch.full_like(like, torch.nan, requires_grad=False)


class _Skeleton(nn.Module):
    """A model's forward with slots in place of its blocks.

    The modules on the path to the blocks are shallow copies.

    Args:
        model: of transformers.
        path: of its blocks.
        modules: those of this layer beside the path, by name; `_Elsewhere` for others.
        tables: modules without parameters, in eval mode.
        returns_tuples: blocks put out the hidden state in a tuple.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        modules: Mapping[str, nn.Module],
        tables: Mapping[str, nn.Module],
        *,
        returns_tuples: bool,
    ) -> None:
        super().__init__()
        self.returns_tuples = returns_tuples
        self.handler: Handler | None = None
        self.hidden: Tensor | None = None
        self._path = path
        self._tables = tuple(tables.values())
        self.model = self._shell(model, "", {**tables, **modules})

    def _shell(
        self, module: nn.Module, prefix: str, modules: Mapping[str, nn.Module]
    ) -> nn.Module:
        shell = copy.copy(module)
        children = shell.__dict__["_modules"] = dict(module._modules)
        for key, child in children.items():
            name = prefix + key
            if child is None:
                continue
            if name == self._path:
                slots = copy.copy(child)
                slots.__dict__["_modules"] = {
                    key: _Slot(block, index, self)
                    for index, (key, block) in enumerate(child.named_children())
                }
                children[key] = slots
            elif is_under(self._path, name):
                children[key] = self._shell(child, f"{name}.", modules)
            else:
                children[key] = modules.get(name) or _Elsewhere(child, self)
        config = getattr(module, "config", None)
        if config is not None:
            shell.__dict__["config"] = config = copy.copy(config)
            for name in _OFF:
                if hasattr(config, name):
                    setattr(config, name, False)
        return shell

    def train(self, mode: bool = True) -> "_Skeleton":
        """Set the mode; tables that stand for those of the first layer draw nothing."""
        super().train(mode)
        for table in self._tables:
            table.eval()
        return self

    def run(self, handler: Handler, batch: Value, hidden: Tensor | None = None) -> Any:
        """Run the forward; with a hidden state, from ``inputs_embeds`` on.

        Returns:
            The model's output; None if the handler has stopped the forward.
        """
        if hidden is not None:
            batch = {k: x for k, x in batch.items() if k != "input_ids"}
            batch["inputs_embeds"] = hidden
        self.handler, self.hidden = handler, hidden
        try:
            return self.model(**batch)
        except _Stop:
            return None
        finally:
            self.handler = self.hidden = None


class _Calls:
    """The arguments of all blocks; those of the last micro-batch are kept."""

    def __init__(self, skeleton: _Skeleton, n_blocks: int) -> None:
        self.skeleton, self._n_blocks = skeleton, n_blocks
        self._calls: list[Call] = []
        self._seen: tuple[Any, ...] = ()

    def of(self, batch: Value, hidden: Tensor) -> list[Call]:
        """Return the arguments of the blocks for a micro-batch."""
        tensors = tensors_in(batch)
        device = hidden.device
        seen = (
            *((id(tensor), tensor._version) for tensor in tensors),
            device,
            not hidden.is_meta and torch.is_autocast_enabled(device.type),
            torch.is_inference_mode_enabled(),
        )
        if not self._seen or self._seen[0] != seen:
            self._calls = []
            zeros = torch.zeros_like(hidden)
            with torch.no_grad():
                self.skeleton.run(self._note, _without_labels(batch), zeros)
            self._seen = seen, tensors  # which keeps the identities alive
        return self._calls

    def _note(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        self._calls.append(call)
        if len(self._calls) == self._n_blocks:
            raise _Stop
        return hidden

    def move(self, fn: Any) -> None:
        """Move the tables that blocks are called with, as `nn.Module._apply` does."""
        self.skeleton._apply(fn)  # type: ignore[no-untyped-call]
        self._seen = ()


# ---- Layers.


class _Layer(nn.Module):
    """A layer that is checked once for the names of a batch, in each mode."""

    compiles: str | None = None
    """The compiled part of the layer: a module in it. Front and back are more Python
    than kernels."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls
        self._checked: set[Any] = set()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._calls.move(fn)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def is_unchecked(self, batch: Value, hidden: Tensor) -> bool:
        """True the first time, for tensors that have numbers."""
        key = self.training, *batch
        is_new = key not in self._checked and not is_fake(hidden)
        if is_new:
            self._checked.add(key)
        return is_new


class _Front(_Layer):
    """The work of the model before its first block."""

    def __init__(self, skeleton: _Skeleton, calls: _Calls) -> None:
        super().__init__(calls)
        self.skeleton = skeleton

    def forward(self, batch: Value) -> Value:
        """From a micro-batch to the first hidden state."""
        first: list[tuple[Tensor, Call]] = []

        def stop(_: int, hidden: Tensor, call: Call) -> Tensor:
            first.append((hidden, call))
            raise _Stop

        self.skeleton.run(stop, _without_labels(batch))
        ((hidden, call),) = first
        if self.is_unchecked(batch, hidden):
            _check_call(call, self._calls.of(batch, hidden)[0])
        return {"hidden": hidden, "batch": batch}


class _Block(_Layer):
    """One block of the model."""

    compiles = "block"

    def __init__(self, block: nn.Module, index: int, calls: _Calls) -> None:
        super().__init__(calls)
        self.block, self._index = block, index

    def forward(self, value: Value) -> Value:
        """From a hidden state to the next one."""
        hidden = value["hidden"]
        args, kwargs = self._calls.of(value["batch"], hidden)[self._index]
        output = self.block(hidden, *args, **kwargs)
        if isinstance(output, tuple):
            output = output[0]
        return {**value, "hidden": output}


class _Back(_Layer):
    """The work of the model after its last block, with its loss if it has labels."""

    def __init__(self, skeleton: _Skeleton, calls: _Calls) -> None:
        super().__init__(calls)
        self.skeleton = skeleton

    def forward(self, value: Value) -> dict[str, Tensor]:
        """From the last hidden state to the tensors of the model's output."""
        hidden, batch = value["hidden"], value["batch"]
        output = self.skeleton.run(lambda *_: hidden, batch, hidden)
        tensors = {k: x for k, x in output.items() if isinstance(x, Tensor)}
        if self.is_unchecked(batch, hidden):
            _check_numbers(hidden, tensors)
        return tensors


def _without_labels(batch: Value) -> Value:
    return {key: value for key, value in batch.items() if key != "labels"}


def _check_call(real: Call, computed: Call) -> None:
    """Compare the arguments of the first block with those that other layers compute.

    Raises:
        RequestError: they do not follow from the batch alone.
    """
    ours, theirs = tensors_in(real), tensors_in(computed)
    is_same = len(ours) == len(theirs) and all(
        not a.requires_grad and a.shape == b.shape and (a.is_meta or torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )
    if not is_same:
        raise RequestError(
            "a block takes tensors that modules before the blocks compute from their "
            "weights, beside the hidden state; cut the model by export: "
            "zbpp.cut(model, example=MICRO_BATCH)"
        )


def _check_numbers(hidden: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a head that reads what ran before the blocks: here it is NaN.

    Raises:
        RequestError: the output has NaN, and the hidden state has none.
    """
    is_nan = any(bool(x.isnan().any()) for x in tensors.values() if not x.is_meta)
    if is_nan and bool(hidden.isfinite().all()):
        raise RequestError(
            "what runs after the blocks reads what ran before them, beside the hidden "
            "state; cut the model by export: zbpp.cut(model, example=MICRO_BATCH)"
        )


# ---- The cut.


def cut_pretrained(
    model: Any, blocks: str | None = None, weights: Source | None = None
) -> Layered:
    """Cut a model of transformers at its blocks.

    Args:
        model: with weights, or on the meta device; its forward takes
            ``inputs_embeds``.
        blocks: path of the blocks; None: `find_blocks` finds them.
        weights: of a model on meta.

    Raises:
        RequestError: the model cannot be cut so.
    """
    if getattr(model.config, "output_router_logits", False):
        raise RequestError(
            "output_router_logits is set, and blocks on other stages put these out; "
            "unset it in the configuration, or cut the model by export: "
            "zbpp.cut(model, example=MICRO_BATCH)"
        )
    source = None if weights is None else Weights(model, weights, initialiser_of(model))
    cut = _Cut(model, *find_blocks(model, blocks), source)
    layers = cut.layers(range(cut.n_layers))
    _try(model, layers)
    return Layered(
        cut.n_layers,
        cut.build,
        parts=cut.parts(),
        own_name=cut.own_name,
        ties=find_ties(layers),
        buffers=shared_buffers(layers, cut.own_name),
        **losses_of(model),
    )


def _try(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Run the layers on four tokens, but for the blocks.

    Raises:
        RequestError: the model's forward does not run around other blocks.
    """
    front, *_, back = layers
    state = random_state(_device_of(model))
    try:
        with torch.no_grad(), _Branches():
            back(front(_tokens(model)))
    except RequestError:
        raise
    except _FAILS as error:
        if _device_of(model).type != "meta" or type(error) is not NotImplementedError:
            raise RequestError(
                f"the forward of this {type(model).__name__} cannot run around other "
                f"blocks than its own: {error}; cut the model by export: "
                "zbpp.cut(model, example=MICRO_BATCH)"
            ) from error
    finally:
        set_random_state(state, _device_of(model))


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _tokens(model: nn.Module) -> Value:
    ones = torch.ones(1, 4, dtype=torch.long, device=_device_of(model))
    return {"input_ids": ones}


class _Cut:
    """A model, where it is cut, and how its layers are built."""

    def __init__(
        self,
        model: nn.Module,
        path: str,
        blocks: Mapping[str, nn.Module],
        weights: Weights | None,
    ) -> None:
        self._model, self._path, self._blocks = model, path, blocks
        self._weights = weights
        self._children: dict[str, nn.Module] = {}
        """Modules beside the path to the blocks, by name."""
        for prefix, module in modules_above(model, path):
            if module._parameters:
                names = ", ".join(prefix + key for key in module._parameters)
                raise RequestError(
                    f"{names}: parameters of a module that lies on several stages; "
                    "cut the model by export: zbpp.cut(model, example=MICRO_BATCH)"
                )
            for key, child in module._modules.items():
                if child is not None and not is_under(path, prefix + key):
                    self._children[prefix + key] = child
        self._returns_tuples = False
        self._before = self._find_before()
        """Names of those that run before the first block."""

    @property
    def n_layers(self) -> int:
        """The blocks, the front and the back."""
        return len(self._blocks) + 2

    def build(self, indices: range) -> list[nn.Module]:
        """Make the layers of some indices with their weights."""
        return self.layers(indices, self._weights)

    def layers(self, indices: range, weights: Weights | None = None) -> list[nn.Module]:
        """Make layers; without `weights` of the model's own modules."""

        def real(name: str, module: nn.Module) -> nn.Module:
            return module if weights is None else weights.make(name)

        tables = {}
        for name, child in self._children.items():
            if name in self._before and not any(True for _ in child.parameters()):
                table = real(name, child)  # with weights it is a copy already
                if weights is None:
                    table = copy.deepcopy(table, groups_kept(table))
                tables[name] = table.eval()
        calls = _Calls(self._skeleton({}, tables), len(self._blocks))
        keys, layers = list(self._blocks), list[nn.Module]()
        for index in indices:
            if 0 < index <= len(keys):
                key = keys[index - 1]
                block = real(f"{self._path}.{key}", self._blocks[key])
                layers.append(_Block(block, index - 1, calls))
                continue
            modules = {
                name: real(name, child)
                for name, child in self._children.items()
                if (name in self._before) == (index == 0)
            }
            skeleton = self._skeleton(modules, tables)
            layers.append((_Back if index else _Front)(skeleton, calls))
        return layers

    def own_name(self, layer: int, name: str) -> str:
        """The model's name of a parameter or buffer of a layer."""
        if 0 < layer <= len(self._blocks):
            key = list(self._blocks)[layer - 1]
            return f"{self._path}.{key}.{name.removeprefix('block.')}"
        return name.removeprefix("skeleton.model.")

    def parts(self) -> dict[str, nn.Module]:
        """The modules that lie in one layer each, by name."""
        blocks = {f"{self._path}.{key}": block for key, block in self._blocks.items()}
        return self._children | blocks

    def _skeleton(
        self, modules: Mapping[str, nn.Module], tables: Mapping[str, nn.Module]
    ) -> _Skeleton:
        return _Skeleton(
            self._model,
            self._path,
            modules,
            tables,
            returns_tuples=self._returns_tuples,
        )

    def _find_before(self) -> frozenset[str]:
        """Run the forward on four tokens as far as its blocks.

        Raises:
            RequestError: a block does not take what the block before puts out.
        """
        names: list[str] = []
        hooks = [
            part.register_forward_pre_hook(_Note(names, name))
            for name, child in self._children.items()
            for part in child.modules()
        ]
        device, tokens = _device_of(self._model), _tokens(self._model)
        state, n_blocks = random_state(device), len(self._blocks)
        reason = "it does not get what the block before it puts out"
        try:
            for self._returns_tuples in (False, True):
                chain = _Chain(names, n_blocks)
                skeleton = self._skeleton(self._children, {})
                try:
                    with torch.no_grad(), _Branches():
                        skeleton.run(chain, tokens)
                except _FAILS as error:
                    reason = f"{type(error).__name__}: {error}"
                if chain.n_called == n_blocks:
                    return frozenset(names[: chain.n_before])
        finally:
            set_random_state(state, device)
            for hook in hooks:
                hook.remove()
        raise RequestError(
            f"the forward of this {type(self._model).__name__} cannot run around "
            f"other blocks than its own: at block {chain.n_called} of {self._path}, "
            f"{reason}; cut the model by export: zbpp.cut(model, example=MICRO_BATCH)"
        )


class _Chain:
    """A handler that passes the hidden state on; stops where blocks are no chain."""

    def __init__(self, names: list[str], n_blocks: int) -> None:
        self.n_called = self.n_before = 0
        self._names, self._n_blocks = names, n_blocks
        names.clear()
        self._hidden: Tensor | None = None

    def __call__(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        if index == 0:
            self._hidden, self.n_before = hidden, len(self._names)
        if hidden is not self._hidden or index != self.n_called:
            raise _Stop
        self.n_called += 1
        if self.n_called == self._n_blocks:
            raise _Stop
        return hidden


class _Branches(TorchFunctionMode):
    """Answers where a forward on the meta device asks for a value, as masks do."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (Tensor.__bool__, Tensor.__contains__) and args[0].is_meta:
            return function is Tensor.__bool__
        return function(*args, **(kwargs or {}))


class _Note:
    """A hook that notes a name."""

    def __init__(self, names: list[str], name: str) -> None:
        self._names, self._name = names, name

    def __call__(self, *_: Any) -> None:
        self._names.append(self._name)
