"""Names of contenders, such as ``zbpp:ZBV`` and ``torch:1F1B``."""

from collections.abc import Sequence

from zbpp.core import Placement, RequestError
from zbpp.planning import canonical, is_file

__all__ = ["OURS", "TORCH", "contenders_of", "split_name", "torch_placement"]

OURS, TORCH = "zbpp", "torch"

_USUAL = (
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
_ALL = (*_USUAL, "GPipe", "LoopedBFS")


def contenders_of(modes: Sequence[str], peers: Sequence[str]) -> tuple[str, ...]:
    """Name all contenders, ours first.

    Args:
        modes: of ours, or schedule files.
        peers: ``torch`` stands for its usual ones, ``torch:NAME`` for one of them.

    Raises:
        RequestError: a name is unknown, or there is none.

    >>> contenders_of(["1f1b"], ["torch:gpipe"])
    ('zbpp:1F1B', 'torch:GPipe')
    """
    contenders = [
        f"{OURS}:{mode if is_file(mode) else canonical(mode)}" for mode in modes
    ]
    for peer in peers:
        names = _USUAL if peer.lower() == TORCH else (_torch_name(peer),)
        contenders += [f"{TORCH}:{name}" for name in names]
    if not contenders:
        raise RequestError("nothing is to be compared; name modes, or peers")
    return tuple(dict.fromkeys(contenders))


def _torch_name(text: str) -> str:
    spellings = {f"{TORCH}:{name}".lower(): name for name in _ALL}
    if text.lower() not in spellings:
        raise RequestError(
            f"--peers {text}: write torch, for {', '.join(_USUAL)}, or torch:NAME with "
            f"one of {', '.join(_ALL)}"
        )
    return spellings[text.lower()]


def split_name(contender: str) -> tuple[str, str]:
    """Return whose a contender is, and its mode or schedule."""
    whose, _, name = contender.partition(":")
    return whose, name


def torch_placement(name: str, n_stages: int) -> Placement:
    """Place the chunks of one of torch's schedules: two a stage, or one."""
    if name in ("1F1B", "GPipe"):
        return Placement.single(n_stages)
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return Placement.wave(n_stages)
    return Placement.interleaved(n_stages, 2)
