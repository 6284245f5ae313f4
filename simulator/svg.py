"""Pictures as shapes, and the writer of SVG.

A picture has areas, each with coordinates for its shapes, and marks: texts and dots.
Its sizes are in points; x goes to the right and y down. `zbpp.simulator.plot` writes
pictures into files, also by matplotlib, and pages contain them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from zbpp.simulator.boxes import DARK, IDLE

__all__ = ["PAGE", "PAPER", "Area", "Bars", "Curve", "Dot", "Picture", "Text", "area"]

Theme = Mapping[str, str]
PAPER = {"ink": DARK, "muted": "#555555", "line": "#DDDDDD", "idle": IDLE}
"""Colours by name, of a picture on white ground."""
PAGE = {name: f"var(--{name})" for name in PAPER}
"""The same on a page, whose style has them in light and in dark."""
_LETTER = 0.6  # width of a letter, in font sizes


class Bars(NamedTuple):
    """Rectangles (x, y, width, height) of one colour.

    ``labels``: attributes of the path, such as the names of the rectangles.
    """

    colour: str
    boxes: Sequence[tuple[float, float, float, float]]
    labels: Mapping[str, str] = {}
    is_outlined: bool = False


class Curve(NamedTuple):
    """A line through points; ``dashes`` as in SVG."""

    colour: str
    points: Sequence[tuple[float, float]]
    width: float = 1.4
    dashes: str = ""


class Text(NamedTuple):
    """A text whose middle is at ``y``; the anchor is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 9.0
    anchor: str = "start"
    colour: str = "ink"
    weight: str = "normal"

    @property
    def width(self) -> float:
        """About that of the text."""
        return _LETTER * self.size * len(self.text)


class Dot(NamedTuple):
    """A filled circle, or a ring."""

    x: float
    y: float
    radius: float
    colour: str
    is_ring: bool = False


class Area(NamedTuple):
    """A rectangle of a picture; ``view``: x, y, width, height as its shapes count."""

    x: float
    y: float
    width: float
    height: float
    view: tuple[float, float, float, float]
    shapes: Sequence[Bars | Curve]


class Picture(NamedTuple):
    """Areas, and marks above them."""

    width: float
    height: float
    areas: Sequence[Area]
    marks: Sequence[Text | Dot]

    def svg(self, theme: Theme = PAPER, font: str = "sans-serif") -> str:
        """The picture as an SVG element, without a ground."""
        parts = [area(one, theme) for one in self.areas]
        parts += [_mark(mark, theme) for mark in self.marks]
        size = f'width="{_n(self.width)}pt" height="{_n(self.height)}pt"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 '
            f'{_n(self.width)} {_n(self.height)}" font-family="{escape(font)}">\n'
            + "\n".join(parts)
            + "\n</svg>\n"
        )

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.svg()


def area(one: Area, theme: Theme, name: str = "") -> str:
    """An area as an SVG element, whose shapes stretch with it."""
    shapes = "".join(_path(shape, theme) for shape in one.shapes)
    sizes = {"x": one.x, "y": one.y, "width": one.width, "height": one.height}
    place = "".join(f' {key}="{_n(value)}"' for key, value in sizes.items())
    where = f' class="{name}"' if name else place
    view = " ".join(map(_n, one.view))
    return f'<svg{where} viewBox="{view}" preserveAspectRatio="none">{shapes}</svg>'


def _path(shape: Bars | Curve, theme: Theme) -> str:
    colour = theme.get(shape.colour, shape.colour)
    fixed = 'vector-effect="non-scaling-stroke"'
    if isinstance(shape, Curve):
        line = "l".join(_moves(shape.points))
        dashes = f' stroke-dasharray="{shape.dashes}"' if shape.dashes else ""
        return (
            f'<path fill="none" stroke="{colour}" stroke-width="{_n(shape.width)}" '
            f'{fixed}{dashes} d="m{line}"/>'
        )
    moves = _moves((x, y) for x, y, *_ in shape.boxes)
    path = "".join(
        f"m{move}h{_n(w)}v{_n(h)}h{_n(-w)}z"
        for move, (_, _, w, h) in zip(moves, shape.boxes, strict=True)
    )
    labels = "".join(
        f' data-{key}="{escape(value)}"' for key, value in shape.labels.items()
    )
    edge = f' stroke="white" stroke-width=".8" {fixed}' if shape.is_outlined else ""
    return f'<path fill="{colour}"{edge}{labels} d="{path}"/>'


def _moves(points: Iterable[tuple[float, float]]) -> Iterator[str]:
    """From point to point: what repeats in a path is then the same text."""
    x = y = 0.0
    for to_x, to_y in points:
        across, down = _n(to_x - x), _n(to_y - y)
        x, y = x + float(across), y + float(down)
        yield f"{across} {down}"


def _mark(mark: Text | Dot, theme: Theme) -> str:
    colour = theme.get(mark.colour, mark.colour)
    x, y = _n(mark.x), _n(mark.y)
    if isinstance(mark, Dot):
        look = f'fill="none" stroke="{colour}"' if mark.is_ring else f'fill="{colour}"'
        return f'<circle cx="{x}" cy="{y}" r="{_n(mark.radius)}" {look}/>'
    weight = f' font-weight="{mark.weight}"' if mark.weight != "normal" else ""
    return (
        f'<text x="{x}" y="{y}" dy=".35em" font-size="{_n(mark.size)}" '
        f'text-anchor="{mark.anchor}" fill="{colour}"{weight}>'
        f"{escape(mark.text)}</text>"
    )


def _n(value: float) -> str:
    return f"{value:.6g}" if abs(value) > 1e-9 else "0"
