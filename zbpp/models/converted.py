"""Tensors of checkpoints of transformers, whose names are not always the model's.

Some models have changed since their checkpoints were written: modules have other names,
or a list of experts is one tensor. transformers keeps tables of that; here they are
applied to single tensors, so that a process reads no more than its layers need.
"""

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import Tensor

__all__ = ["Read", "converted"]

Read = Callable[[str], Tensor | None]
"""From a name to a tensor; None: there is none."""


def converted(model: Any, names: Collection[str], read: Read) -> Read:
    """Read tensors by the model's names from files that have others.

    Args:
        model: of transformers, on the meta device.
        names: in the files.
        read: reads one of them.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        dot_natural_key,
        rename_source_key,
    )

    state_dict = model.state_dict()
    table: list[Any] = get_model_conversion_mapping(model)
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    renamings = [entry for entry in table if not isinstance(entry, WeightConverter)]
    by_pattern = {
        p: converter for converter in converters for p in converter.source_patterns
    }
    sources: dict[str, list[tuple[str, str | None]]] = {}
    for name in sorted(names, key=dot_natural_key):
        if name in state_dict:
            sources[name] = [(name, None)]
            continue
        called, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state_dict
        )
        targets = [called]
        if pattern is not None:
            first, *others = by_pattern[pattern].target_patterns
            targets += [called.replace(first, replacement) for replacement in others]
        for target in targets:
            sources.setdefault(target, []).append((name, pattern))
    return partial(_read, model, sources, by_pattern, read)


def _read(
    model: Any,
    sources: dict[str, list[tuple[str, str | None]]],
    by_pattern: dict[str, Any],
    read: Read,
    name: str,
) -> Tensor | None:
    """Read one tensor of the model, made of one or several in the files."""
    entries = sources.get(name, [])
    if not entries:
        return None
    file_name, pattern = entries[0]
    if pattern is None:
        return read(file_name)
    converter = copy.deepcopy(by_pattern[pattern])
    for file_name, source_pattern in entries:
        converter.add_tensor(name, file_name, source_pattern, partial(read, file_name))
    tensors = converter.convert(name, model=model, config=model.config)
    tensor = tensors.get(name)
    made: Tensor | None = tensor[0] if isinstance(tensor, list) else tensor
    return made
