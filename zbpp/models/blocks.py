"""The list of repeated blocks at which a model is cut."""

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import nn

from zbpp.core import RequestError

BlockList = nn.ModuleList | nn.Sequential | nn.ModuleDict


def find_blocks(model: nn.Module, path: str | None) -> tuple[str, dict[str, nn.Module]]:
    """Return the path of a model's blocks, and the blocks by their keys.

    Args:
        model: of any kind.
        path: of the blocks; None: the only list of modules that is in no other one. Of
            several, a model of transformers takes those of ``num_hidden_layers``
            blocks, an encoder-decoder those of its decoder.

    Raises:
        RequestError: there is no such list, or more than one.
    """
    if path is not None:
        blocks: Any = model
        for part in path.split("."):
            blocks = getattr(blocks, part, None)
        if _is_list(blocks):
            return path, dict(blocks.named_children())
        kind = "nothing" if blocks is None else f"a {type(blocks).__name__}"
        raise RequestError(f"{path} is {kind} in a {_lists_text(model)}")
    lists = outer_lists(model)
    config: Any = getattr(model, "config", None)
    if len(lists) > 1 and getattr(config, "is_encoder_decoder", False):
        lists = {name: x for name, x in lists.items() if "decoder" in name}
    if len(lists) > 1 and hasattr(config, "num_hidden_layers"):
        n_blocks = config.num_hidden_layers
        lists = {name: x for name, x in lists.items() if len(x) == n_blocks}
    if len(lists) != 1:
        raise RequestError(f"name the blocks of this {_lists_text(model)}")
    (path,) = lists
    return path, dict(lists[path].named_children())


def is_under(name: str, path: str) -> bool:
    """True for the name of a module, or of anything inside it."""
    return name == path or name.startswith(f"{path}.")


def outer_lists(model: nn.Module) -> dict[str, BlockList]:
    """Lists of several modules that are in no other list."""
    lists: dict[str, BlockList] = {}
    for name, module in model.named_modules():
        is_inner = not name or any(is_under(name, outer) for outer in lists)
        if _is_list(module) and not is_inner:
            lists[name] = module
    return {name: blocks for name, blocks in lists.items() if len(blocks) > 1}


def _is_list(module: Any) -> TypeGuard[BlockList]:
    """True for a list of modules, and for a dictionary of modules of one type.

    torchtitan's models have their blocks in a dictionary, so that a stage can leave
    some out. Dictionaries may also contain unlike modules, as in nanoGPT.
    """
    if isinstance(module, nn.ModuleDict):
        kinds = {type(child) for child in module.values()}
        return len(kinds) == 1 and not issubclass(kinds.pop(), BlockList)
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0


def _lists_text(model: nn.Module) -> str:
    lists = [f"{name!r} ({len(x)})" for name, x in outer_lists(model).items()]
    return (
        f"{type(model).__name__}, as in zbpp.cut(model, 'encoder.layers'); it has the "
        f"lists {', '.join(lists[:8]) or 'none'}"
    )


def modules_above(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules on a path without the last, with the prefix of their names."""
    module, prefix = model, ""
    yield prefix, module
    for part in path.split(".")[:-1]:
        module, prefix = getattr(module, part), f"{prefix}{part}."
        yield prefix, module
