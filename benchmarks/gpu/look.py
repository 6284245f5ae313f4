"""Look for a GPU; needs torch alone."""

import torch

__all__ = ["look"]


def look() -> int:
    """Return 0, or say that there is none and return 2."""
    if torch.cuda.is_available():
        return 0
    print(
        "gpu day: torch finds no GPU here, so nothing is measured; a dry run is "
        "`python benchmarks/gpu --device cpu --out DIR`"
    )
    return 2
