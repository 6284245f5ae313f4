"""From a module to layers that a pipeline deals to stages.

layered    `Layered`: layers by index, their own names, ties, loss and batch
"""

from zbpp.models.layered import Layered, Tie

__all__ = ["Layered", "Tie"]
