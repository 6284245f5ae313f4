"""The only place that touches names which torch does not document.

Each has a fallback, so that a torch without the name is slower, not wrong.
"""

import torch.autograd.profiler

__all__ = ["profiling"]


def profiling() -> bool:
    """Whether a profiler records; a range costs some 10 us even if none does.

    Seen in torch 2.9 to 2.13. Where the name is gone, ranges are always recorded.
    """
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))
