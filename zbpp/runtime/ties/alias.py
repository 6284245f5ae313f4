"""A parameter that stands for another one in one layer's forwards.

    layer 0   weight                gradient of layer 0's uses
    layer 5   alias of weight       gradient of layer 5's uses

Both are one memory. The alias stands in the layer only while its forward runs, so that
the model is the user's own at any other time.
"""

from collections.abc import Callable, Mapping
from copy import copy

from torch import nn

__all__ = ["AliasedLayer", "alias_parameter", "set_parameter"]


def alias_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """Return another parameter on the same memory."""
    return nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)


def set_parameter(layer: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put a parameter in the place, or places, of another."""
    for module, name in _places(layer, old):
        setattr(module, name, new)


def _places(layer: nn.Module, parameter: nn.Parameter) -> list[tuple[nn.Module, str]]:
    return [
        (module, name)
        for module in layer.modules()
        for name, held in module._parameters.items()
        if held is parameter
    ]


class AliasedLayer:
    """Runs a layer with other parameters in the places of some.

    Args:
        layer: any module.
        leaves: what stands in for its parameters.
        owners: of each leaf, the parameter whose memory it shares.
    """

    def __init__(
        self,
        layer: nn.Module,
        leaves: Mapping[nn.Parameter, nn.Parameter],
        owners: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self._call: Callable[[object], object] = layer
        self._pairs = [(leaf, owners[leaf]) for leaf in leaves.values()]
        self._places = [
            (*place, parameter, leaf)
            for parameter, leaf in leaves.items()
            for place in _places(layer, parameter)
        ]

    def running(self, call: Callable[[object], object]) -> "AliasedLayer":
        """The same, with something else that runs the layer."""
        other = copy(self)
        other._call = call
        return other

    def __call__(self, value: object) -> object:
        """Run the forward."""
        for leaf, owner in self._pairs:
            _follow(leaf, owner)
        try:
            for module, name, _, leaf in self._places:
                setattr(module, name, leaf)
            output = self._call(value)
        finally:
            for module, name, parameter, _ in self._places:
                setattr(module, name, parameter)
        return output


def _follow(leaf: nn.Parameter, owner: nn.Parameter) -> None:
    """Let an alias share the owner's memory and freezing, should these have changed."""
    if leaf is owner:
        return
    if leaf.untyped_storage()._cdata != owner.untyped_storage()._cdata:
        leaf.data = owner.data
    if leaf.requires_grad != owner.requires_grad:
        leaf.requires_grad_(owner.requires_grad)
