"""Compare the settings of all processes; an error of one ends all of them."""

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

from zbpp.core import RequestError
from zbpp.runtime.executor import Executor
from zbpp.runtime.support.errors import PeerError

_SHOWN = 3  # names in an error

Gather = Callable[[Any], list[Any]]
"""Gives every process the things of all, by rank."""


@contextmanager
def agreement(gather: Gather) -> Iterator[dict[str, object]]:
    """Compare facts of all processes at the end of this block; all must call.

    The first error of any process within the block ends it on all of them.

    Yields:
        Facts by their names, for the block to fill; their ``repr`` must be the same.
    """
    facts: dict[str, object] = {}
    error: Exception | None = None
    report = None
    try:
        yield facts
    except Exception as caught:
        error = caught
        report = isinstance(error, RequestError), type(error).__name__, str(error)
    digests = {
        name: hashlib.sha256(repr(fact).encode()).digest()
        for name, fact in facts.items()
    }
    answers = gather((report, digests))
    for rank, (first, _) in enumerate(answers):
        if error is not None and first == report:
            raise error
        if first is not None:
            is_request, kind, text = first
            if is_request:
                raise RequestError(text) from error
            text = f"rank {rank} failed at the start: {kind}: {text}"
            raise PeerError(text) from error
    seen: dict[str, tuple[int, bytes]] = {}
    for rank, (_, answer) in enumerate(answers):
        for name, digest in answer.items():
            at, expected = seen.setdefault(name, (rank, digest))
            if digest != expected:
                raise RequestError(
                    f"ranks {at} and {rank} were started with different {name}; start "
                    "all ranks with the same arguments and layers"
                )


def check_chosen(executors: Mapping[int, Executor]) -> None:
    """Refuse optimizers that train nothing; warn of parameters that no step changes."""
    transport = next(iter(executors.values())).transport
    chosen = [x.optimizer.optimizers.chosen() for x in executors.values()]
    stepped, rest, sizes = zip(*chain(*transport.gather(chosen)), strict=True)
    names = list(dict.fromkeys(chain(*rest)))
    shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
    if names and not any(stepped):
        raise RequestError(
            f"optimizer= steps none of the {len(names)} parameters that require "
            f"gradients ({shown}); compare these names with the names that it selects, "
            "or give optimizer=None to step yourself"
        )
    text = ""
    if names:
        text = (
            f"{len(names)} parameter(s) learn, but no optimizer steps them ({shown}): "
            "their gradients are cleared, and do not count in the norm; if that is not "
            "meant, let the optimizer's builder take all the parameters that it is "
            "called with"
        )
    elif any(sizes) and not any(stepped):
        text = (
            "all parameters of the model are frozen (requires_grad is False), so steps "
            "train nothing; unfreeze some, or call evaluate() and predict()"
        )
    if text and transport.peers.rank == 0:
        warnings.warn(text, stacklevel=4)
