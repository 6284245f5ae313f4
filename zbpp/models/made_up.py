"""The tensors that follow from those that stand-ins have made up.

In a layer that is not the first, absent modules put out tensors of the right shapes
without the model's values. A first batch may hide that these matter: a mask that leaves
nothing out is all zero, and so is its stand-in. What depends on them is therefore
followed from function to function, whatever the values are.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zbpp.models.stand_ins import Site
from zbpp.runtime.support.pytree import tensors_in

__all__ = ["FollowsMadeUp"]


class FollowsMadeUp(TorchFunctionMode):
    """Notes tensors that functions of torch compute from made-up ones.

    Functions that a library compiles itself are not seen.

    Args:
        site: of the frame that runs in this mode.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        self._site = site
        self._computed: dict[int, Tensor] = {}
        self.is_branched_on = False
        """Values of such a tensor were read by the host, or by an absent module."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, and note what it makes of made-up tensors."""
        output = function(*args, **(kwargs or {}))
        if function not in _SHAPE_ONLY and self.follows((args, kwargs)):
            if function in _READS:
                self.is_branched_on = True
            changed = args[0] if function is Tensor.__setitem__ else output
            self._computed |= {id(tensor): tensor for tensor in tensors_in(changed)}
        return output

    def follows(self, thing: Any) -> bool:
        """True if a tensor in it is made up, or computed from such."""
        return any(
            self._site.is_made_up(tensor) or id(tensor) in self._computed
            for tensor in tensors_in(thing)
        )

    @property
    def is_needed(self) -> bool:
        """True if what the forward does may depend on values that are made up."""
        return self.is_branched_on or self._site.has_assumed


_READS = frozenset(
    {
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.item,
        Tensor.tolist,
        Tensor.numpy,
        Tensor.is_nonzero,
        Tensor.equal,
        Tensor.allclose,
        torch.equal,
        torch.allclose,
        torch.is_nonzero,
    }
)
"""Functions that hand values to the host."""

_SHAPE_ONLY = frozenset(
    {
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
        torch.rand_like,
        torch.randn_like,
        torch.randint_like,
        Tensor.new_empty,
        Tensor.new_zeros,
        Tensor.new_ones,
        Tensor.new_full,
        Tensor.new_tensor,
    }
)
"""Functions that read the shape, dtype or device of their tensor alone."""
