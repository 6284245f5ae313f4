"""Any module as layers: `torch.distributed.pipelining.pipeline` splits its graph.

    embed | block 0 | block 1 | .. | block n-1 | norm, head

Values that later parts read (masks, a learned bias, a skip from the embedding to the
head) travel with the hidden state, and their gradients come back. The shapes of a
micro-batch are fixed: those of the example.
"""

import operator
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbpp.core import RequestError
from zbpp.models.hugging_face import is_pretrained, losses_of
from zbpp.models.layered import Layered, of_layers
from zbpp.runtime.support.pytree import TreeSpec, flatten_tree, unflatten_tree
from zbpp.runtime.support.torch_internals import run_graphs_on, use_generated_code

_UNSUPPORTED = (AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
_SECOND_CALL = re.compile(r"@\d+")
"""In the name of a module that a part calls more than once."""


def cut_by_export(
    model: nn.Module, example: Any, blocks: Sequence[nn.Module]
) -> Layered:
    """Cut a module that `torch.export` can export at its blocks.

    Args:
        model: with weights.
        example: a micro-batch, or one like it: a dict gives keywords, a tuple
            arguments, all else is the argument.
        blocks: of the model.

    Raises:
        RequestError: the model cannot be exported, or cut at these blocks.
    """
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
            _export(model.train(mode), blocks, leaves, inputs) for mode in (True, False)
        ]
    finally:
        for part, mode in modes.items():
            part.training = mode
        if caches:
            config.use_cache = True
    parts = [_Part(exported, i, leaves) for i in range(len(exported[0].graphs))]
    _add_other_names(model, parts)
    return of_layers(
        parts,
        _own_name,
        parts={f"layer {index}": part for index, part in enumerate(parts)}
        | {name: part for name, part in model.named_modules() if name},
        functions=losses_of(model) if is_pretrained(model) else None,
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
        note: called with the leaves of the output, None in place of tensors, and with
            its structure.
    """

    def __init__(self, model: nn.Module, inputs: TreeSpec, note: Any) -> None:
        super().__init__()
        self.model, self._inputs, self._note = model, inputs, note

    def forward(self, *leaves: Any) -> tuple[Tensor, ...]:
        """Call the model."""
        args, kwargs = unflatten_tree(leaves, self._inputs)
        outputs, structure = flatten_tree(self.model(*args, **kwargs))
        others = [None if isinstance(x, Tensor) else x for x in outputs]
        self._note((others, structure))
        return tuple(x for x in outputs if isinstance(x, Tensor))


class _Graph(NamedTuple):
    """One part of a graph: its module, and names of values."""

    module: nn.Module
    reads: list[str]
    results: dict[int, str]
    """By place in what it puts out."""
    later: list[str]
    """Those that later parts read."""


@dataclass
class _Exported:
    """The graph of a model in one mode."""

    graphs: list[_Graph]
    inputs: list[str]
    """Names of the leaves of a micro-batch."""
    outputs: list[str]
    """Names of the tensors that the model returns."""
    others: list[Any]
    """Outputs that are no tensors; None in the places of tensors."""
    structure: TreeSpec

    def wrap(self, values: Mapping[str, Tensor]) -> Any:
        """Return the output of the model; of another class, a dict of tensors."""
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
    # imports torch's compiler, which takes longer than the other models need
    from torch.distributed.pipelining import pipe_split, pipeline

    def split(*_: Any) -> None:
        pipe_split()  # type: ignore[no-untyped-call]

    noted: list[Any] = []
    hooks = [block.register_forward_hook(split) for block in blocks]
    hooks.append(blocks[0].register_forward_pre_hook(split))
    try:
        with warnings.catch_warnings():
            # torch's use of its pytree
            warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
            pipe = pipeline(_Flat(model, inputs, noted.append), mb_args=tuple(leaves))
    except _UNSUPPORTED as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise RequestError(
            f"torch.export cannot export this {type(model).__name__}: {reason}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    modules = {f"model.{name}".rstrip("."): x for name, x in model.named_modules()}
    nodes = list(pipe.split_gm.graph.nodes)
    outputs = [x.name for x in nodes[-1].args[0]]
    graphs: list[_Graph] = []
    later = set(outputs)
    for node in reversed(nodes):
        if node.op != "call_module":
            continue
        module = pipe.split_gm.get_submodule(node.target)
        use_generated_code(module)
        _use_tensors_of(modules, module)
        items = [user for user in node.users if user.target is operator.getitem]
        results = {x.args[1]: x.name for x in items} or {0: node.name}
        reads = [x.name for x in node.args]
        graphs.insert(0, _Graph(module, reads, results, sorted(later)))
        later = later.difference(results.values()).union(reads)
    names = [node.name for node in nodes if node.op == "placeholder"]
    return _Exported(graphs, names, outputs, *noted[-1])


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
        exported: in both modes.
        index: of the part.
        example: leaves of a micro-batch.
    """

    def __init__(
        self, exported: Sequence[_Exported], index: int, example: Sequence[Any]
    ) -> None:
        super().__init__()
        self._exported, self._index, self._example = exported, index, example
        self.graph, evaluation = (x.graphs[index].module for x in exported)
        twins = dict(self.graph.named_modules())
        for name, part in evaluation.named_modules():
            if name in twins:  # what is loaded or moved is so for both
                part.__dict__["_parameters"] = twins[name]._parameters
                part.__dict__["_buffers"] = twins[name]._buffers
        self._devices: dict[int, torch.device] = {}
        """Where the graph of each mode makes tensors."""

    def forward(self, value: Any) -> Any:
        """From a micro-batch, or values, to values, or to the model's output."""
        mode = int(not self.training)
        exported = self._exported[mode]
        graph, reads, results, later = exported.graphs[self._index]
        if self._index == 0:
            leaves, _ = flatten_tree(_arguments(value))
            _check_shapes(leaves, self._example)
            value = dict(zip(exported.inputs, leaves, strict=True))
        inputs = [value[name] for name in reads]
        device = next((x.device for x in inputs if isinstance(x, Tensor)), None)
        if device is not None and device != self._devices.get(mode):
            self._devices[mode] = device
            run_graphs_on(graph, device)
            _move_constants(graph, device)
        outputs = graph(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        values = value | {name: outputs[i] for i, name in results.items()}
        if self._index == len(exported.graphs) - 1:
            return exported.wrap(values)
        return {name: values[name] for name in later}


def _move_constants(graph: nn.Module, device: torch.device) -> None:
    """Move the tensors that a forward makes of numbers."""
    for part in graph.modules():
        for key, x in vars(part).items():
            if isinstance(x, Tensor):
                part.__dict__[key] = x.to(device)


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
