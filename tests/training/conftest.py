"""Fixtures of the training's tests: more threads would add in another order."""

from one_thread import one_thread

__all__ = ["one_thread"]
