"""Values of a state as JSON: exact, and read without running anything.

JSON's own types stay as they are. Everything else is an object with one key, its kind:

    {"tuple": [...]}   {"dict": [[key, value], ...]}   {"counter": ...}
    {"float": "inf"}   {"tensor": "optimizer/0.weight/0/exp_avg"}
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from zbpp.core import RequestError

__all__ = ["decode", "encode", "misfit"]


def encode(value: Any, where: str, put: Callable[[str, Tensor], None]) -> Any:
    """Turn a value into what `json` writes.

    Args:
        value: numbers, texts, tensors, and containers of them.
        where: its path; the names of its tensors begin with it.
        put: takes each tensor, with its name.

    Raises:
        RequestError: a part of it is something else.

    >>> encode({"lr": 0.1, "betas": (0.9, float("inf"))}, "group", print)
    {'dict': [['lr', 0.1], ['betas', {'tuple': [0.9, {'float': 'inf'}]}]]}
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, Tensor):
        put(where, value)
        return {"tensor": where}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{where}/{i}", put) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        rows = [
            [encode(key, f"{where}/key", put), encode(item, f"{where}/{key}", put)]
            for key, item in value.items()
        ]
        return {kind: rows}
    raise RequestError(
        f"{where} is a {type(value).__name__}, which a checkpoint cannot hold; it "
        "holds numbers, texts, tensors, and lists, tuples and dicts of them"
    )


def decode(value: Any, get: Callable[[str], Tensor]) -> Any:
    """Turn what `encode` has made back.

    Args:
        value: as `json` reads it.
        get: gives the tensor of a name.

    Raises:
        RequestError: there is a kind that `encode` does not make.
    """
    if isinstance(value, list):
        return [decode(item, get) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((kind, content),) = value.items()
        match kind:
            case "tensor":
                return get(content)
            case "float":
                return float(content)
            case "tuple":
                return tuple(decode(item, get) for item in content)
            case "dict":
                return {decode(key, get): decode(item, get) for key, item in content}
            case "counter":
                return Counter({decode(k, get): decode(n, get) for k, n in content})
    raise RequestError(f"a checkpoint has no values of the kind {sorted(value)}")


def misfit(saved: Any, here: Any, where: str) -> str | None:
    """Describe the first part of a saved value that cannot stand for the one here.

    Numbers and tensors may stand for one another, lists may have other lengths, and
    anything may stand where None is now. Tables hold at least the keys of those here.
    """
    if here is None or (saved is None and isinstance(here, bool)):
        return None
    if isinstance(here, int | float | Tensor):
        fits = isinstance(saved, int | float | Tensor) and not (
            isinstance(here, int) and isinstance(saved, float) and saved % 1
        )
        return None if fits else f"{where} is {saved!r:.40}, no number as here"
    if isinstance(here, dict):
        if not isinstance(saved, dict) or here.keys() - saved.keys():
            return f"{where} lacks parts that it has here"
        parts = (misfit(saved[key], here[key], f"{where}/{key}") for key in here)
        return next((text for text in parts if text), None)
    if type(saved) is not type(here):
        return f"{where} is a {type(saved).__name__}, here a {type(here).__name__}"
    return None
