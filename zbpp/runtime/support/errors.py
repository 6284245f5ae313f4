"""Errors of a running pipeline."""

from zbpp.core import RequestError

__all__ = ["NonFiniteError", "PeerError", "ShapeError", "torn_step"]


class PeerError(RuntimeError):
    """Another stage died or did not answer in time: that stage has the cause."""


class ShapeError(RequestError):
    """A tensor between two stages changed its shape or dtype between steps."""


class NonFiniteError(RuntimeError):
    """Gradients were Inf or NaN in too many steps in a row."""


def torn_step(step: int) -> RuntimeError:
    """The error for a state that no exception can be taken out of any more."""
    return RuntimeError(
        f"step {step} (from 0) was interrupted by an exception in the middle of its "
        "optimizer step, so parameters and optimizer state do not belong together; "
        "load a checkpoint in a new Pipeline"
    )
