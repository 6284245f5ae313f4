"""Faults on demand, for tests: ``ZBPP_FAULT=kind:rank:step:job``.

``raise:1:3:0F2`` raises on rank 1 in step 3 when it comes to job 0F2; ``kill``,
``stop`` and ``term`` send this process SIGKILL, SIGSTOP or SIGTERM there; ``memory``
raises what torch does when memory runs out. Steps count from 0. Beside jobs there are
``commit``, ``undo``, ``redo`` and ``replay``, the parts of a validation; those of step
2 come in step 3.
"""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from zbpp.core import RequestError

__all__ = ["Fault", "InjectFault", "fault_injector", "no_fault", "requested_fault"]

InjectFault = Callable[[object], None]
"""Called with what comes now: an instruction, or the name of a part of a validation."""

_SIGNALS = {"kill": "SIGKILL", "stop": "SIGSTOP", "term": "SIGTERM"}
_KINDS = ("raise", "memory", *_SIGNALS)


@dataclass(frozen=True)
class Fault:
    """A fault and its place."""

    kind: str
    rank: int
    step: int
    job: str

    def inject(self, rank: int, step: int, job: str) -> None:
        """Let it happen if this is the place.

        Raises:
            RuntimeError: for the kind ``raise``.
            OutOfMemoryError: for the kind ``memory``.
        """
        if (self.rank, self.step, self.job) != (rank, step, job):
            return
        if self.kind in _SIGNALS:
            os.kill(os.getpid(), signal.Signals[_SIGNALS[self.kind]])
        elif self.kind == "memory":
            raise torch.OutOfMemoryError("memory has run out, as ZBPP_FAULT asked for")
        else:
            raise RuntimeError("a fault that ZBPP_FAULT asked for")


def requested_fault(environment: Mapping[str, str] = os.environ) -> Fault | None:
    """Read ``ZBPP_FAULT``.

    Raises:
        RequestError: it is set, but not of the form above.
    """
    text = environment.get("ZBPP_FAULT")
    if not text:
        return None
    parts = text.split(":")
    if len(parts) != 4 or parts[0] not in _KINDS or not (parts[1] + parts[2]).isdigit():
        raise RequestError(
            f"ZBPP_FAULT is {text!r}; write kind:rank:step:job with kind one of "
            f"{', '.join(_KINDS)}"
        )
    return Fault(parts[0], int(parts[1]), int(parts[2]), parts[3])


class HasStep(Protocol):
    """Knows the number of the step that runs."""

    step: int


def no_fault(_: object) -> None:
    """No fault is asked for."""


def fault_injector(rank: int, stage: HasStep) -> InjectFault:
    """Make what lets the fault of ``ZBPP_FAULT`` happen on a stage of a rank.

    Raises:
        RequestError: see `requested_fault`.
    """
    fault = requested_fault()
    if fault is None:
        return no_fault
    return lambda what: fault.inject(rank, stage.step, str(what))
