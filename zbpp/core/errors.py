"""Errors that the caller can correct."""

from zbpp.core.amounts import format_memory


class RequestError(ValueError):
    """The request was wrong or cannot be met; the message names the correction."""


class LimitError(RequestError):
    """A memory limit is too low.

    Args:
        reason: the schedule or part that needs more.
        smallest: the limit for all stages that works.
    """

    def __init__(self, reason: str, smallest: float) -> None:
        super().__init__(reason, smallest)
        self.reason = reason
        self.smallest = smallest

    def __str__(self) -> str:
        smallest = format_memory(self.smallest, round_up=True)
        return (
            f"{self.reason}; the smallest limit that works is {smallest}: take "
            f"smaller micro-batches, or raise memory_limit to {smallest} or more"
        )


class ScheduleError(RequestError):
    """A schedule breaks a rule; the message marks the place in its grid."""


class WorkerError(RuntimeError):
    """A process of a pipeline failed; the message is one line."""


def a_kind(thing: object) -> str:
    """Name the class of a thing in a message, with its article.

    A ``U`` is mostly spoken as in UNet.

    >>> a_kind(1.5), a_kind(3)
    ('a float', 'an int')
    """
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"
