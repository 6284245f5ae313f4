"""Look for a GPU; needs torch alone."""

import torch

__all__ = ["is_real", "look"]


def look() -> int:
    """Return 0, or say that there is none and return 2."""
    if torch.cuda.is_available():
        return 0
    print(
        "gpu day: torch finds no GPU here, so nothing is measured; a dry run is "
        "`make gpu-simulated`"
    )
    return 2


def is_real(device: torch.device) -> bool:
    """True if times and kernels on it are those of a GPU, not of a simulated one."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return bool(name) and not name.startswith("simulated")
