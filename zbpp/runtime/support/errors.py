"""Errors of a running pipeline."""

from zbpp.core import RequestError


class PeerError(RuntimeError):
    """Another stage died or did not answer in time: that stage has the cause."""


class ShapeError(RequestError):
    """A tensor between two stages changed its shape or dtype between steps."""


class SumsError(RequestError):
    """The sums of a step show that ranks do not go together; all find it themselves."""


class NonFiniteError(RuntimeError):
    """Gradients were Inf or NaN in too many steps in a row."""
