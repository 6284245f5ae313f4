"""Shapes of a page's timelines as elements of SVG; x goes to the right and y down."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

__all__ = ["area", "bars", "curve"]

_FIXED = 'vector-effect="non-scaling-stroke"'


def area(
    name: str, width: float, height: float, shapes: Iterable[str], style: str = ""
) -> str:
    """Shapes that stretch with the element of a class."""
    view = f'viewBox="0 0 {_n(width)} {_n(height)}" preserveAspectRatio="none"'
    styled = f' style="{style}"' if style else ""
    return f'<svg{styled} class="{name}" {view}>{"".join(shapes)}</svg>'


def bars(
    colour: str,
    boxes: Sequence[tuple[float, float, float, float]],
    labels: Mapping[str, str] = {},
) -> str:
    """Rectangles (x, y, width, height) of one colour, as one path.

    ``labels``: data of the path, such as the names of the rectangles.
    """
    moves = _moves((x, y) for x, y, *_ in boxes)
    path = "".join(
        f"m{move}h{_n(w)}v{_n(h)}h{_n(-w)}z"
        for move, (_, _, w, h) in zip(moves, boxes, strict=True)
    )
    data = "".join(f' data-{key}="{escape(value)}"' for key, value in labels.items())
    return f'<path fill="{colour}"{data} d="{path}"/>'


def curve(
    colour: str,
    points: Sequence[tuple[float, float]],
    width: float = 1.4,
    dashes: str = "",
) -> str:
    """A line through points."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<path fill="none" stroke="{colour}" stroke-width="{_n(width)}" '
        f'{_FIXED}{dashed} d="m{"l".join(_moves(points))}"/>'
    )


def _moves(points: Iterable[tuple[float, float]]) -> Iterator[str]:
    """From point to point: what repeats in a path is then the same text."""
    x = y = 0.0
    for to_x, to_y in points:
        across, down = _n(to_x - x), _n(to_y - y)
        x, y = x + float(across), y + float(down)
        yield f"{across} {down}"


def _n(value: float) -> str:
    return f"{value:.6g}" if abs(value) > 1e-9 else "0"
