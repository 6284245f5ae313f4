"""Names of contenders: ``zbpp:ZBV`` is a mode of ours, ``torch:1F1B`` a peer's."""

from collections.abc import Sequence

from zbpp.core import Placement, RequestError
from zbpp.planning import canonical, is_file

__all__ = ["OURS", "TORCH", "contenders_of", "peer_placement", "split_name"]

OURS, TORCH = "zbpp", "torch"

_PLACEMENTS = {
    "1F1B": "single",
    "GPipe": "single",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "interleaved",
    "InterleavedZeroBubble": "interleaved",
    "ZBVZeroBubble": "wave",
    "DualPipeV": "wave",
}
"""Placement of the chunks of each of torch's schedules."""

_USUAL = (
    "1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)


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
        if peer.lower() == TORCH:
            contenders += [f"{TORCH}:{name}" for name in _USUAL]
        else:
            contenders.append(f"{TORCH}:{_peer(peer)}")
    if not contenders:
        raise RequestError("nothing is to be compared; name modes, or peers")
    return tuple(dict.fromkeys(contenders))


def _peer(text: str) -> str:
    spellings = {name.lower(): name for name in _PLACEMENTS}
    whose, _, name = text.partition(":")
    if whose.lower() != TORCH or name.lower() not in spellings:
        raise RequestError(
            f"--peers {text}: write torch, for {', '.join(_USUAL)}, or torch:NAME with "
            f"one of {', '.join(_PLACEMENTS)}"
        )
    return spellings[name.lower()]


def split_name(contender: str) -> tuple[str, str]:
    """Return whose a contender is, and its mode or schedule."""
    whose, _, name = contender.partition(":")
    return whose, name


def peer_placement(name: str, n_stages: int) -> Placement:
    """Place the chunks of one of torch's schedules: two a stage, or one."""
    match _PLACEMENTS[name]:
        case "single":
            return Placement.single(n_stages)
        case "wave":
            return Placement.wave(n_stages)
        case _:
            return Placement.interleaved(n_stages, 2)
