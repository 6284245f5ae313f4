"""Models of transformers as layers: the model's forward around other blocks.

    front   the forward up to its first block
    block   one of the model's blocks, with the arguments that the forward gives it
    back    the forward from ``inputs_embeds`` on, with the last hidden state after it

The arguments of a block (masks, rotary tables) follow from the batch, so the batch
travels with the hidden state and nothing else does. Each process computes the arguments
once for each micro-batch, by a forward without weights. Nothing is traced, and no
forward is written again: masks, the head and the loss are the model's code.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zbpp.core import RequestError
from zbpp.models.blocks import is_under, modules_above
from zbpp.models.hugging_face import losses_of
from zbpp.models.layered import Layered, of_layers
from zbpp.models.weights import Weights
from zbpp.runtime.support.collectives import groups_kept
from zbpp.runtime.support.pytree import tensors_in
from zbpp.runtime.support.random_state import random_state, set_random_state

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


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"{reason}; cut the model by export: zbpp.cut(model, example=MICRO_BATCH)"
    )


# ---- The forward around other blocks.


class _Stop(BaseException):
    """Ends a forward whose rest is not needed."""


class _StandIn(nn.Module):
    """Replaces a module, with its attributes: models ask blocks for their kind.

    Args:
        module: of the model.
        call: takes the place of its forward.
    """

    def __init__(self, module: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__.update(_module=module, _call=call)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.__dict__["_module"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the replacement of the module."""
        return self.__dict__["_call"](*args, **kwargs)


class _Skeleton(nn.Module):
    """A model's forward with stand-ins for its blocks.

    The modules on the path to the blocks are shallow copies.

    Args:
        model: of transformers.
        path: of its blocks.
        modules: those of this layer outside the path, by name. Others put out NaN, so
            that nothing can use them without being seen.
        tables: modules without parameters, in eval mode.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        modules: Mapping[str, nn.Module],
        tables: Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        self._path = path
        self._handler: Handler | None = None
        self._hidden: Tensor | None = None
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
                slots = children[key] = copy.copy(child)
                slots.__dict__["_modules"] = {
                    key: _StandIn(block, partial(self._run_block, index))
                    for index, (key, block) in enumerate(child.named_children())
                }
            elif is_under(self._path, name):
                children[key] = self._shell(child, f"{name}.", modules)
            else:
                children[key] = modules.get(name) or _StandIn(child, self._put_out_nan)
        config = getattr(module, "config", None)
        if config is not None:
            shell.__dict__["config"] = config = copy.copy(config)
            for name in _OFF:
                if hasattr(config, name):
                    setattr(config, name, False)
        return shell

    def _run_block(self, index: int, *args: Any, **kwargs: Any) -> Tensor:
        if not args or not isinstance(args[0], Tensor):
            raise _refusal(
                f"block {index} is called without a hidden state as its first argument"
            )
        assert self._handler is not None
        return self._handler(index, args[0], (args[1:], kwargs))

    def _put_out_nan(self, *_: Any, **__: Any) -> Tensor:
        assert self._hidden is not None
        return torch.full_like(self._hidden, torch.nan, requires_grad=False)

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
        self._handler, self._hidden = handler, hidden
        try:
            return self.model(**batch)
        except _Stop:
            return None
        finally:
            self._handler = self._hidden = None


class _Calls:
    """The arguments of all blocks; those of the last micro-batch are kept."""

    def __init__(self, skeleton: _Skeleton, n_blocks: int) -> None:
        self._skeleton, self._n_blocks = skeleton, n_blocks
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
            self._skeleton.to(device)
            with torch.no_grad():
                zeros = torch.zeros_like(hidden)
                self._skeleton.run(self._note, _without_labels(batch), zeros)
            self._seen = seen, tensors  # which keeps the identities alive
        return self._calls

    def _note(self, index: int, hidden: Tensor, call: Call) -> Tensor:
        self._calls.append(call)
        if len(self._calls) == self._n_blocks:
            raise _Stop
        return hidden


def _without_labels(batch: Value) -> Value:
    return {key: value for key, value in batch.items() if key != "labels"}


# ---- Layers.


class _Front(nn.Module):
    """The work of the model before its first block."""

    compiles = None
    """More Python than kernels."""

    def __init__(self, skeleton: _Skeleton) -> None:
        super().__init__()
        self.skeleton = skeleton

    def forward(self, batch: Value) -> Value:
        """From a micro-batch to the first hidden state."""
        first: list[Tensor] = []

        def stop(_: int, hidden: Tensor, call: Call) -> Tensor:
            first.append(hidden)
            raise _Stop

        self.skeleton.run(stop, _without_labels(batch))
        return {"hidden": first[0], "batch": batch}


class _Block(nn.Module):
    """One block of the model."""

    compiles = "block"

    def __init__(self, block: nn.Module, index: int, calls: _Calls) -> None:
        super().__init__()
        self.block, self._index, self.calls = block, index, calls

    def forward(self, value: Value) -> Value:
        """From a hidden state to the next one."""
        hidden = value["hidden"]
        args, kwargs = self.calls.of(value["batch"], hidden)[self._index]
        output = self.block(hidden, *args, **kwargs)
        return {**value, "hidden": output[0] if isinstance(output, tuple) else output}


class _Back(nn.Module):
    """The work of the model after its last block, with its loss if it has labels."""

    compiles = None

    def __init__(self, skeleton: _Skeleton) -> None:
        super().__init__()
        self.skeleton = skeleton

    def forward(self, value: Value) -> dict[str, Tensor]:
        """From the last hidden state to the tensors of the model's output."""
        hidden = value["hidden"]
        output = self.skeleton.run(lambda *_: hidden, value["batch"], hidden)
        return {key: x for key, x in output.items() if isinstance(x, Tensor)}


# ---- The cut.


def cut_pretrained(
    model: Any, path: str, blocks: Mapping[str, nn.Module], weights: Weights | None
) -> Layered:
    """Cut a model of transformers, whose forward takes ``inputs_embeds``.

    Args:
        model: with weights, or on the meta device.
        path: of the blocks.
        blocks: by their keys.
        weights: of a model on meta.

    Raises:
        RequestError: the model cannot be cut so.
    """
    if getattr(model.config, "output_router_logits", False):
        raise _refusal(
            "output_router_logits is set, and blocks on other stages put these out; "
            "unset it in the configuration"
        )
    cut = _Cut(model, path, blocks)
    cut.check()
    layers = cut.layers(range(len(blocks) + 2))
    build = None if weights is None else partial(cut.layers, weights=weights)
    return of_layers(
        layers,
        cut.own_name,
        parts=dict(model.named_children()),
        build=build,
        functions=losses_of(model),
    )


class _Cut:
    """A model, where it is cut, and how its layers are made."""

    def __init__(
        self, model: nn.Module, path: str, blocks: Mapping[str, nn.Module]
    ) -> None:
        self._model, self._path, self._blocks = model, path, blocks
        self._beside: dict[str, nn.Module] = {}
        """Modules outside the path to the blocks, by name."""
        for prefix, module in modules_above(model, path):
            if module._parameters:
                names = ", ".join(prefix + key for key in module._parameters)
                raise _refusal(
                    f"{names}: parameters of a module that lies on several stages"
                )
            for key, child in module._modules.items():
                if child is not None and not is_under(path, prefix + key):
                    self._beside[prefix + key] = child
        self._before: frozenset[str] = frozenset()
        """Names of those that run before the first block."""

    def layers(self, indices: range, weights: Weights | None = None) -> list[nn.Module]:
        """Make layers; without `weights` of the model's modules."""

        def real(name: str, module: nn.Module) -> nn.Module:
            return module if weights is None else weights.make(name)

        tables = {
            name: copy.deepcopy(real(name, child), groups_kept(child)).eval()
            for name, child in self._beside.items()
            if name in self._before and not any(True for _ in child.parameters())
        }
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
                for name, child in self._beside.items()
                if (name in self._before) == (index == 0)
            }
            skeleton = self._skeleton(modules, tables)
            layers.append((_Back if index else _Front)(skeleton))
        return layers

    def _skeleton(
        self, modules: Mapping[str, nn.Module], tables: Mapping[str, nn.Module]
    ) -> _Skeleton:
        return _Skeleton(self._model, self._path, modules, tables)

    def own_name(self, layer: int, name: str) -> str:
        """The model's name of a parameter or buffer of a layer."""
        if 0 < layer <= len(self._blocks):
            key = list(self._blocks)[layer - 1]
            return f"{self._path}.{key}.{name.removeprefix('block.')}"
        return name.removeprefix("skeleton.model.")

    def check(self) -> None:
        """Run the parts before and after the blocks on four tokens.

        Raises:
            RequestError: the forward does not run around other blocks.
        """
        device = next(self._model.parameters()).device
        tokens = {"input_ids": torch.ones(1, 4, dtype=torch.long, device=device)}
        state, names = random_state(device), list[str]()
        hooks = [
            part.register_forward_pre_hook(partial(_note, names, name))
            for name, child in self._beside.items()
            for part in child.modules()
        ]
        try:
            with torch.no_grad(), _Branches():
                hidden, call = self._run_to_blocks(tokens, names)
                self._check_rest(tokens, hidden, call)
        except RequestError:
            raise
        except _FAILS as error:
            if device.type != "meta" or type(error) is not NotImplementedError:
                kind = type(self._model).__name__
                raise _refusal(
                    f"the forward of this {kind} cannot run around blocks of another "
                    f"class: {error}"
                ) from error
        finally:
            set_random_state(state, device)
            for hook in hooks:
                hook.remove()

    def _run_to_blocks(self, tokens: Value, names: list[str]) -> tuple[Tensor, Call]:
        """Return the hidden state and the arguments that the first block gets.

        Raises:
            ValueError: a block does not read the output of the block before.
        """
        calls: list[tuple[Tensor, Call]] = []

        def chain(index: int, hidden: Tensor, call: Call) -> Tensor:
            if not calls:
                self._before = frozenset(names)
            if index != len(calls) or (calls and hidden is not calls[0][0]):
                raise _Stop
            calls.append((hidden, call))
            if len(calls) == len(self._blocks):
                raise _Stop
            return hidden

        self._skeleton(self._beside, {}).run(chain, tokens)
        if len(calls) < len(self._blocks):
            raise ValueError(
                f"block {len(calls)} of {self._path} does not read the output of the "
                "block before it"
            )
        return calls[0]

    def _check_rest(self, tokens: Value, hidden: Tensor, call: Call) -> None:
        """Refuse blocks and heads that read more than the batch and the hidden state.

        Raises:
            RequestError: they do.
        """
        block, *_, back = self.layers(range(1, len(self._blocks) + 2))
        assert isinstance(block, _Block)
        computed = tensors_in(block.calls.of(tokens, hidden)[0])
        real = tensors_in(call)
        if len(real) != len(computed) or not all(map(_are_equal, real, computed)):
            raise _refusal(
                "a block takes tensors that modules before the blocks compute from "
                "their weights, other than the hidden state"
            )
        output = back({"hidden": hidden, "batch": tokens})
        is_nan = any(bool(x.isnan().any()) for x in output.values() if not x.is_meta)
        if is_nan and bool(hidden.isfinite().all()):
            raise _refusal(
                "the part after the blocks reads more of the part before them than "
                "the hidden state"
            )


def _are_equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and (a.is_meta or torch.equal(a, b))


def _note(names: list[str], name: str, *_: Any) -> None:
    """A hook that notes a name."""
    names.append(name)


class _Branches(TorchFunctionMode):
    """Answers where a forward on the meta device asks for a value, as masks do."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in (Tensor.__bool__, Tensor.__contains__) and args[0].is_meta:
            return function is Tensor.__bool__
        return function(*args, **(kwargs or {}))
