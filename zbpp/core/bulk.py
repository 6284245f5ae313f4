"""Make millions of small objects quickly."""

import gc
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import TypeVar

__all__ = ["bulk_construct", "gc_paused"]

_T = TypeVar("_T")


def bulk_construct(
    made_of: type[_T], n: int, /, **fields: Iterable[object]
) -> list[_T]:
    """Make n objects of a frozen dataclass with slots, in half the time of its calls.

    Args:
        made_of: the class.
        n: their number.
        fields: of each field a value for every object; further ones are not looked at.

    >>> from zbpp.core.jobs import Step
    >>> bulk_construct(Step, 2, stage=[0, 1])
    [Step(stage=0), Step(stage=1)]
    """
    made = list(map(object.__new__, repeat(made_of, n)))
    for name, values in fields.items():
        deque(map(vars(made_of)[name].__set__, made, values), maxlen=0)
    return made


@contextmanager
def gc_paused() -> Iterator[None]:
    """Make many objects that stay without a look for circles among them now and then.

    It takes a third of the time of millions of jobs, and there are no circles.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
