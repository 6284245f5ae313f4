"""Errors that are the caller's to mend."""

__all__ = ["RequestError", "ScheduleError", "WorkerError"]


class RequestError(ValueError):
    """The request was wrong or cannot be met; the message says how to mend it."""


class ScheduleError(RequestError):
    """A schedule breaks a rule; the message marks the place in its grid."""


class WorkerError(RuntimeError):
    """A process of a pipeline failed; the message is one line."""
