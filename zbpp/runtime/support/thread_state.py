"""The state that torch and Python keep for each thread, carried into another one.

by thread      grad mode, autocast, the default device, the current stream, Python's
               context variables
by process     default dtype, deterministic algorithms, generators, anomaly mode:
               nothing to carry
"""

import contextvars
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import torch

from zbpp.runtime.support.devices import runs_ahead

T = TypeVar("T")


class ThreadState:
    """The state of the thread that makes this object; of a device too."""

    def __init__(self, device: torch.device) -> None:
        self._context = contextvars.copy_context()
        self._has_grad = torch.is_grad_enabled()
        self._caches_casts = torch.is_autocast_cache_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted({"cpu", device.type})
            if torch.amp.is_autocast_available(kind)
        ]
        self._default_device = torch.get_default_device()
        self._runs_ahead = runs_ahead(device)
        self._stream: torch.Stream | None = None
        if self._runs_ahead:
            self._stream = torch.accelerator.current_stream(device)

    def run(self, function: Callable[[], T]) -> T:
        """Call a function in another thread as in that one.

        Backwards within it run on this thread alone, also on an accelerator, for which
        autograd has one thread: where that waits here for another thread,
        no backward that the other thread starts would ever end.
        """
        return self._context.run(self._run, function)

    def _run(self, function: Callable[[], T]) -> T:
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(self._stream)
            if self._runs_ahead:
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._default_device != torch.get_default_device():
                stack.enter_context(self._default_device)
            stack.enter_context(torch.set_grad_enabled(self._has_grad))
            for kind, is_enabled, dtype in self._autocast:
                if is_enabled:
                    cast = torch.autocast(
                        kind, dtype=dtype, cache_enabled=self._caches_casts
                    )
                    stack.enter_context(cast)
            return function()
