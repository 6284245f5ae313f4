"""The places of a kind of model's blocks, and of what stands before and after them."""

from dataclasses import dataclass

__all__ = ["Family"]


@dataclass(frozen=True)
class Family:
    """Names in a model's base model; heads beside it run after the blocks.

    Args:
        blocks: path of the list of blocks.
        before: modules and parameters that are used before the first block.
        after: those that are used after the last one.
        only_front: entries of a batch that are used before the first block only.
    """

    blocks: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()
    only_front: tuple[str, ...] = ()
