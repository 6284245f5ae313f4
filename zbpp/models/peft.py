"""Models of peft: the model with adapters in it, and the names below the wrapper."""

from typing import Any

from torch import nn

from zbpp.core import RequestError

__all__ = ["base_of", "is_peft"]


def is_peft(model: object) -> bool:
    """True for a `PeftModel`; loads nothing."""
    return any(
        kind.__name__ == "PeftModel" and kind.__module__.startswith("peft")
        for kind in type(model).__mro__
    )


def base_of(model: Any) -> tuple[str, nn.Module]:
    """The wrapped model with the adapters in it, and the prefix of its names.

    Raises:
        RequestError: the adapter is a prompt, which lies in the wrapper.
    """
    for config in model.peft_config.values():
        if config.is_prompt_learning:
            raise RequestError(
                f"peft's {config.peft_type} puts a prompt before the model, in a "
                "forward of its own that a pipeline does not run; use an adapter "
                "inside of layers, such as LoRA"
            )
    base: nn.Module = model.get_base_model()
    prefix = next(name for name, held in model.named_modules() if held is base)
    return f"{prefix}.", base
