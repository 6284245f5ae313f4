"""Colours and names of jobs, the same in pictures and on pages.

Colours are those of Okabe and Ito, which people with any colour vision can tell
apart; later chunks of a stage are lighter.
"""

from zbpp.core import Collective, Job, Pass, Placement

__all__ = ["COLOURS", "DARK", "IDLE", "NAMES", "ink_on", "legs", "letter_of", "shade"]

COLOURS = {
    "F": "#0072B2",
    "B": "#E69F00",
    "W": "#009E73",
    "BW": "#D55E00",
    "O": "#F0E442",
    "V": "#CC79A7",
    "SEND": "#8A8A8A",
    "UNSHARD": "#56B4E9",
    "REDUCE_GRAD": "#8C6D31",
}
NAMES = {
    "F": "F  forward",
    "B": "B  input gradient",
    "W": "W  weight gradient",
    "BW": "BW  both gradients",
    "O": "O  optimizer step",
    "V": "V  validation of the last step",
    "SEND": "sending",
    "UNSHARD": "UNSHARD",
    "REDUCE_GRAD": "REDUCE_GRAD",
}
IDLE = "#E4E4E4"
DARK = "#222222"


def letter_of(job: Job) -> str:
    """Return the key of a job in `COLOURS` and `NAMES`."""
    return str(job.kind) if isinstance(job, Pass | Collective) else str(job)


def legs(placement: Placement) -> dict[int, int]:
    """Tell of each chunk whether it is the first (0), second (1), ... of its stage."""
    return {
        chunk: leg for chunks in placement.chunks_of for leg, chunk in enumerate(chunks)
    }


def shade(colour: str, leg: int) -> str:
    """Lighten a colour for the second chunk of a stage, more so for later ones."""
    white = (0.0, 0.5, 0.7, 0.8)[min(leg, 3)]
    mixed = (round(255 * (part + (1 - part) * white)) for part in _rgb(colour))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def ink_on(colour: str) -> str:
    """Dark or white letters, whichever stand out from a colour."""
    red, green, blue = _rgb(colour)
    return DARK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"


def _rgb(colour: str) -> tuple[float, float, float]:
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue
