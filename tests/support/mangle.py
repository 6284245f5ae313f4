"""Files changed at random: bytes, and the values inside of JSON."""

import copy
import json
import random
from typing import Any

NASTY: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    2**31,
    10**12,
    10**30,
    10**400,
    0.5,
    -0.0,
    1e308,
    1e101,
    1e-320,
    float("inf"),
    float("nan"),
    "",
    "x",
    "0F0",
    "inf",
    "1e400",
    "40GiB",
    "..",
    "../x",
    "/etc/hostname",
    "<!--",
    [],
    {},
    [[]],
    [None],
    [1.0, "a"],
    {"a": 1},
    {"tensor": "x"},
    {"tuple": 1},
    {"float": "x"},
    {"dict": [[[], 1]]},
    {"dict": 3},
    {"counter": [1]},
)
_DEPTH = 5000  # deeper than Python's stack


def mangled_bytes(text: str, rng: random.Random) -> str:
    """Flip, insert, repeat or cut some characters."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(text) + 1)
        piece = text[at : at + rng.randint(1, 12)]
        match rng.randrange(5):
            case 0:
                text = text[:at]
            case 1:
                text = text[:at] + chr(rng.choice((0, 9, 34, 45, 57, 91, 0x2028)))
            case 2:
                text = text[:at] + text[at + len(piece) :]
            case 3:
                text = text[:at] + piece * rng.randint(2, 50) + text[at:]
            case 4:
                text = text[:at] + str(rng.choice(NASTY)) + text[at + 1 :]
    return text


def mangled_json(data: Any, rng: random.Random) -> Any:
    """Replace, remove, repeat or swap some values of what JSON holds."""
    data = copy.deepcopy(data)
    for _ in range(rng.randint(1, 3)):
        places = list(_places(data))
        if not places:
            return data
        holder, key = rng.choice(places)
        match rng.randrange(6):
            case 0 if isinstance(holder, dict):
                holder["unknown"] = holder.pop(key)
            case 0 | 1:
                del holder[key]
            case 2 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(holder[key]))
            case 3:
                other, place = rng.choice(places)
                holder[key] = copy.deepcopy(other[place])
            case _:
                holder[key] = copy.deepcopy(rng.choice(NASTY))
    return data


def mangled_text(text: str, rng: random.Random) -> str:
    """Mangle a JSON file in one of the two ways; now and then nest it too deep."""
    if rng.random() < 0.02:
        return "[" * _DEPTH + "]" * _DEPTH
    if rng.random() < 0.2:
        return mangled_bytes(text, rng)
    return json.dumps(mangled_json(json.loads(text), rng))


def _places(data: Any) -> Any:
    """Every container with each of its keys, the deeper ones too."""
    keys: Any = ()
    if isinstance(data, dict):
        keys = list(data)
    elif isinstance(data, list):
        keys = range(len(data))
    for key in keys:
        yield data, key
        yield from _places(data[key])
