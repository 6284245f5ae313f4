"""Any module as layers: `torch.distributed.pipelining.pipeline` splits its graph.

    embed | block 0 | block 1 | .. | block n-1 | norm, head

Values that later parts read (masks, a learned bias, a skip from the embedding to the
head) travel with the hidden state, and their gradients come back. The shapes of a
micro-batch are fixed: those of the example.
"""

import operator
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split, pipeline

from zbpp.core import RequestError
from zbpp.models.blocks import find_blocks, is_under, modules_above
from zbpp.models.hugging_face import initialiser_of, is_pretrained, losses_of
from zbpp.models.layered import Layered, shared_buffers
from zbpp.models.weights import Source, Weights, reset
from zbpp.runtime.support.pytree import TreeSpec, flatten_tree, unflatten_tree
from zbpp.runtime.support.torch_internals import run_graphs_on, use_generated_code
from zbpp.runtime.ties.plan import find_ties

__all__ = ["cut_by_export"]

_UNSUPPORTED = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
_SECOND_CALL = re.compile(r"@\d+")
"""In the name of a module that a part calls more than once."""

Values = dict[str, Tensor]
"""Tensors that travel between layers, by the names of the graph."""


def cut_by_export(
    model: nn.Module,
    example: Any,
    blocks: str | None = None,
    weights: Source | None = None,
) -> Layered:
    """Cut a module that `torch.export` can export at its blocks.

    Args:
        model: with weights, or on the meta device.
        example: a micro-batch, or one like it: a dict gives keywords, a tuple
            arguments, all else is the argument.
        blocks: path of the blocks; None: `find_blocks` finds them.
        weights: of a model on meta.

    Raises:
        RequestError: the model cannot be exported, or cut at these blocks.
    """
    path, children = find_blocks(model, blocks)
    leaves, inputs = flatten_tree(_arguments(example))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    leaves = [x.detach().to(device) if isinstance(x, Tensor) else x for x in leaves]
    modes = {part: part.training for part in model.modules()}
    config: Any = getattr(model, "config", None)
    caches = getattr(config, "use_cache", None)
    try:
        if caches:  # of keys and values, which a training step does not need
            config.use_cache = False
        exported = [
            _export(model.train(mode), list(children.values()), leaves, inputs)
            for mode in (True, False)
        ]
    finally:
        for part, mode in modes.items():
            part.training = mode
        if caches:
            config.use_cache = True
    graphs = zip(*(x.graphs for x in exported), strict=True)
    parts = [
        _Part(pair, exported, index, None if index else leaves)
        for index, pair in enumerate(graphs)
    ]
    _add_other_names(model, parts)
    units = [f"{path}.{key}" for key in children]
    for prefix, above in modules_above(model, path):
        names = [prefix + key for key, _ in above.named_children()]
        units += [name for name in names if not is_under(path, name)]
    source = None
    if weights is not None:
        init = initialiser_of(model) if is_pretrained(model) else reset
        source = Weights(model, weights, init)

    def build(indices: range) -> list[nn.Module]:
        if source is None:
            return [parts[index] for index in indices]
        return [parts[index].with_weights(source, units) for index in indices]

    losses = losses_of(model) if is_pretrained(model) else {}
    return Layered(
        len(parts),
        build,
        parts={f"layer {index}": part for index, part in enumerate(parts)}
        | {name: part for name, part in model.named_modules() if name},
        own_name=_own_name,
        ties=find_ties(parts),
        buffers=shared_buffers(parts, _own_name),
        **losses,
    )


def _own_name(layer: int, name: str) -> str:
    return _SECOND_CALL.sub("", name.removeprefix("graph.model."))


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and keywords with which a model takes a batch."""
    if isinstance(batch, Mapping):
        return (), dict(sorted(batch.items()))
    return (batch if isinstance(batch, tuple) else (batch,)), {}


# ---- The graph of a model, in parts.


class _Flat(nn.Module):
    """A model that takes leaves, and returns those of its output that are tensors.

    Args:
        model: of any kind.
        inputs: structure of its arguments and keywords.
        note: called with the other leaves of the output, and with its structure.
    """

    def __init__(
        self, model: nn.Module, inputs: TreeSpec, note: Callable[..., None]
    ) -> None:
        super().__init__()
        self.model, self._inputs, self._note = model, inputs, note

    def forward(self, *leaves: Any) -> tuple[Tensor, ...]:
        """Call the model."""
        args, kwargs = unflatten_tree(leaves, self._inputs)
        outputs, structure = flatten_tree(self.model(*args, **kwargs))
        self._note([None if isinstance(x, Tensor) else x for x in outputs], structure)
        return tuple(x for x in outputs if isinstance(x, Tensor))


class _Step(NamedTuple):
    """Names of the values of one part."""

    reads: list[str]
    results: dict[int, str]
    """Outputs of its graph, by place."""
    leaves: list[str]
    """Values that later parts read."""


@dataclass
class _Exported:
    """The graph of a model in one mode."""

    graphs: list[nn.Module]
    steps: list[_Step]
    inputs: list[str]
    """Names of the leaves of a micro-batch."""
    outputs: list[str]
    """Names of the tensors that the model returns."""
    others: list[Any]
    """Outputs that are no tensors; None in the places of tensors."""
    structure: TreeSpec

    def wrap(self, values: Values) -> Any:
        """Return the output of the model; of a class of its own, a dict of tensors."""
        tensors = iter([values[name] for name in self.outputs])
        leaves = [next(tensors) if x is None else x for x in self.others]
        output = unflatten_tree(leaves, self.structure)
        if isinstance(output, dict) and type(output) is not dict:
            return {k: x for k, x in output.items() if isinstance(x, Tensor)}
        return output


def _export(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    leaves: Sequence[Any],
    inputs: TreeSpec,
) -> _Exported:
    """Export a model, and split it where blocks begin."""
    noted: list[Any] = []
    flat = _Flat(model, inputs, lambda *output: noted.append(output))
    hooks = [block.register_forward_hook(_split) for block in blocks]
    hooks.append(blocks[0].register_forward_pre_hook(_split))
    try:
        with warnings.catch_warnings():
            # torch's own use of its pytree
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            pipe = pipeline(flat, mb_args=tuple(leaves))
    except _UNSUPPORTED as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise RequestError(
            f"torch.export cannot export this {type(model).__name__}: {reason}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    nodes = list(pipe.split_gm.graph.nodes)
    calls = [node for node in nodes if node.op == "call_module"]
    (end,) = (node for node in nodes if node.op == "output")
    names = [node.name for node in nodes if node.op == "placeholder"]
    outputs = [x.name for x in end.args[0]]
    graphs = [pipe.split_gm.get_submodule(node.target) for node in calls]
    modules = {f"model.{name}".rstrip("."): x for name, x in model.named_modules()}
    for graph in graphs:
        use_generated_code(graph)
        _use_tensors_of(modules, graph)
    steps: list[_Step] = []
    later = set(outputs)
    for node in reversed(calls):
        step = _Step([x.name for x in node.args], _results(node), sorted(later))
        steps.insert(0, step)
        later = later.difference(step.results.values()).union(step.reads)
    return _Exported(graphs, steps, names, outputs, *noted[-1])


def _results(call: Any) -> dict[int, str]:
    """Names of what a part puts out: its node, or the items of its tuple."""
    items = [user for user in call.users if user.target is operator.getitem]
    return {user.args[1]: user.name for user in items} or {0: call.name}


def _split(*_: Any) -> None:
    """A hook that marks a place where the graph is split."""
    pipe_split()  # type: ignore[no-untyped-call]


def _use_tensors_of(modules: Mapping[str, nn.Module], graph: nn.Module) -> None:
    """Give a part the parameters and buffers of the model: some are copies."""
    for name, part in graph.named_modules():
        original = modules.get(_SECOND_CALL.sub("", name))
        for key in [*part._buffers]:
            if original is None or key not in original._buffers:
                # a constant of the forward, another one in each mode
                part.__dict__[key] = part._buffers.pop(key)
                continue
            part._buffers[key] = original._buffers[key]
            if key in original._non_persistent_buffers_set:
                part._non_persistent_buffers_set.add(key)
        for key in [*part._parameters]:
            assert original is not None
            part._parameters[key] = original._parameters[key]


# ---- Layers.


class _Part(nn.Module):
    """One part of the graph, in training and in evaluation.

    Args:
        graphs: of this part, in both modes.
        exported: in both modes.
        index: of the part.
        example: leaves of a micro-batch; None: this is not the first part.
    """

    def __init__(
        self,
        graphs: Sequence[nn.Module],
        exported: Sequence[_Exported],
        index: int,
        example: Sequence[Any] | None,
    ) -> None:
        super().__init__()
        self.graph, evaluation = self._graphs = tuple(graphs)
        twins = dict(self.graph.named_modules())
        for name, part in evaluation.named_modules():
            if name in twins:  # what is loaded or moved is so for both
                part.__dict__["_parameters"] = twins[name]._parameters
                part.__dict__["_buffers"] = twins[name]._buffers
        self._exported, self._index, self._example = exported, index, example
        self._devices: list[torch.device | None] = [None, None]
        """Where the graphs make tensors."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        for part, key, constant in self._constants():
            part.__dict__[key] = fn(constant)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def forward(self, value: Any) -> Any:
        """From a micro-batch, or values, to values, or to the model's output."""
        mode = int(not self.training)
        exported, graph = self._exported[mode], self._graphs[mode]
        if self._example is not None:
            leaves, _ = flatten_tree(_arguments(value))
            _check_shapes(leaves, self._example)
            value = dict(zip(exported.inputs, leaves, strict=True))
        reads, results, later = exported.steps[self._index]
        inputs = [value[name] for name in reads]
        device = next((x.device for x in inputs if isinstance(x, Tensor)), None)
        if device not in (None, self._devices[mode]):
            self._devices[mode] = device
            run_graphs_on(graph, device)
        outputs = graph(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        values = value | {name: outputs[i] for i, name in results.items()}
        if self._index == len(exported.steps) - 1:
            return exported.wrap(values)
        return {name: values[name] for name in later}

    def _constants(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Tensors that the forward makes, in both graphs."""
        return [
            (part, key, x)
            for graph in self._graphs
            for part in graph.modules()
            for key, x in vars(part).items()
            if isinstance(x, Tensor)
        ]

    def with_weights(self, weights: Weights, units: Sequence[str]) -> "_Part":
        """Return the same part with weights in place of tensors on meta.

        Args:
            weights: of the model.
            units: names of modules that are initialised as a whole.

        Raises:
            RequestError: a tensor is no parameter or buffer of the model.
        """
        graphs = [_copy_modules(graph) for graph in self._graphs]
        made: dict[Tensor, Tensor] = {}
        modules: dict[str, nn.Module] = {}
        for name, part in graphs[0].named_modules():
            if part._parameters or part._buffers:
                path = _own_name(0, f"graph.{name}.").rstrip(".")
                unit = next((unit for unit in units if is_under(path, unit)), None)
                if unit is None:
                    source = weights.make_alone(path)
                else:
                    if unit not in modules:
                        modules[unit] = weights.make(unit)
                    source = modules[unit].get_submodule(path[len(unit) + 1 :])
                for kind in ("_parameters", "_buffers"):
                    tensors, new = getattr(part, kind), getattr(source, kind)
                    for key in tensors.keys() & new.keys():
                        tensors[key] = made.setdefault(tensors[key], new[key])
        made_part = _Part(graphs, self._exported, self._index, self._example)
        tensors = [*made_part.parameters(), *made_part.buffers()]
        tensors += [constant for *_, constant in made_part._constants()]
        if any(x.is_meta for x in tensors):
            raise RequestError(
                "the forward makes constants, which have no values in an export on the "
                "meta device; make the model on a real one, or pass a list of layers"
            )
        return made_part


def _copy_modules(module: nn.Module) -> nn.Module:
    """Copy a module and its children; the tensors stay."""
    copied: nn.Module = object.__new__(type(module))
    copied.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        copied.__dict__[name] = dict(module.__dict__[name])
    for key, child in module.named_children():
        copied._modules[key] = _copy_modules(child)
    return copied


def _check_shapes(leaves: Sequence[Any], example: Sequence[Any]) -> None:
    """Refuse a micro-batch of other shapes than the graph's.

    Raises:
        RequestError: it is so.
    """
    shapes, expected = (
        [[*x.shape] if isinstance(x, Tensor) else x for x in batch]
        for batch in (leaves, example)
    )
    if shapes != expected:
        raise RequestError(
            f"a micro-batch has the shapes {shapes}, and the model was cut by export "
            f"for {expected}; give zbpp.cut(example=) a micro-batch of these shapes, "
            "or pad the batch"
        )


def _add_other_names(model: nn.Module, parts: Sequence[_Part]) -> None:
    """Register what no part has under its name, for checkpoints of the model's names.

    A tied parameter has one name in the graph of each part; others are unused.
    """
    roots = [part.graph.get_submodule("model") for part in parts]
    names = {name for root in roots for name, _ in _tensors(root)}
    homes = {x: root for root in reversed(roots) for _, x in _tensors(root)}
    for name, tensor in _tensors(model):
        if name not in names:
            *path, key = name.split(".")
            module = homes.get(tensor, roots[0])
            for child in path:
                if child not in module._modules:
                    # first, as in the model, whose first name of a tensor counts
                    module._modules = {child: nn.Module(), **module._modules}
                module = module.get_submodule(child)
            if isinstance(tensor, nn.Parameter):
                module._parameters[key] = tensor
            else:
                module._buffers[key] = tensor


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a checkpoint with all their names."""
    yield from module.state_dict(keep_vars=True).items()
