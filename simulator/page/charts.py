"""Small charts as SVG, with the names of modes beside their marks.

    bubble |  o 1F1B                 bubble |\\
           |      o ZBH1                    | \\____ 1F1B
           |           (o) auto             |\\_____ ZBH1
           |_________________ memory        |________ m

Colours of text and lines are the page's; those of modes are Okabe and Ito's.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

__all__ = ["bubble_and_memory", "bubble_and_microbatches"]

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 18, 14, 42
_LABELS = 210  # pixels right of lines, for their names
_SPACING = 14  # pixels between names
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("", "6 3", "2 3")

Scale = Callable[[float], float]
Series = Mapping[str, Sequence[tuple[int, float]]]


def bubble_and_memory(
    points: Mapping[str, tuple[float, float]],
    *,
    unit: str = "",
    limit: float | None = None,
    chosen: str = "auto",
) -> str:
    """Draw peak memory and bubble rate (0 to 1) of each mode; ``chosen`` has a ring."""
    if not points:
        return ""
    most = max(memory for memory, _ in points.values())
    top = max(bubble for _, bubble in points.values())
    x_ticks, y_ticks = _ticks(max(most, limit or 0.0)), _ticks(top)
    x = _scale(0.0, x_ticks[-1], _LEFT, _WIDTH - _RIGHT)
    y = _scale(0.0, y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    label = f"peak memory of a stage{f', {unit}' if unit else ''}"
    parts = [*_axes(x, x_ticks, y, y_ticks, label)]
    if limit is not None:
        parts.append(
            f'<line class="limit" x1="{x(limit):.1f}" x2="{x(limit):.1f}" '
            f'y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"><title>limit</title></line>'
        )
    for names, at, to in _together(points, x, y):
        tip = "".join(
            f"{name}: bubble {bubble:.2%}, memory {memory:.4g} {unit}\n"
            for name in names
            for memory, bubble in [points[name]]
        )
        parts.append(
            f'<circle class="dot" cx="{at:.1f}" cy="{to:.1f}" r="5">'
            f"<title>{escape(tip.strip())}</title></circle>"
        )
        if chosen in names:
            parts.append(f'<circle class="ring" cx="{at:.1f}" cy="{to:.1f}" r="9"/>')
    parts += _names(points, x, y, chosen)
    return _svg(parts, "Bubble rate against peak memory")


def bubble_and_microbatches(series: Series, *, at: int | None = None) -> str:
    """Draw the bubble rate (0 to 1) of each mode over the micro-batches in a step."""
    shown = _same_lines(series)
    if not shown:
        return ""
    every = sorted({m for points in shown.values() for m, _ in points})
    top = max(bubble for points in shown.values() for _, bubble in points)
    y_ticks = _ticks(top)
    span = (math.log2(every[0]), math.log2(every[-1]))
    right = _WIDTH - _LABELS
    flat = _scale(span[0], max(span[1], span[0] + 1e-9), _LEFT + 6, right)

    def x(m: float) -> float:
        return flat(math.log2(m))

    y = _scale(0.0, y_ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    parts = [*_axes(x, every, y, y_ticks, "micro-batches in a step (m)")]
    if at is not None and every[0] <= at <= every[-1]:
        parts.append(
            f'<line class="limit" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" '
            f'y2="{_HEIGHT - _BOTTOM}"><title>this comparison</title></line>'
        )
    ends: dict[str, tuple[float, str]] = {}
    for number, (name, points) in enumerate(shown.items()):
        style = f"stroke:{_COLOURS[number % len(_COLOURS)]}"
        if dash := _DASHES[number // len(_COLOURS) % len(_DASHES)]:
            style += f";stroke-dasharray:{dash}"
        line = " ".join(f"{x(m):.1f},{y(bubble):.1f}" for m, bubble in points)
        parts.append(
            f'<polyline class="series" style="{style}" points="{line}">'
            f"<title>{escape(name)}</title></polyline>"
        )
        ends[name] = (y(points[-1][1]), style)
    for name, height in _spread({name: end for name, (end, _) in ends.items()}):
        parts.append(
            f'<line class="series" style="{ends[name][1]}" x1="{right + 8}" '
            f'x2="{right + 24}" y1="{height:.1f}" y2="{height:.1f}"/>'
            f'<text class="name" x="{right + 30}" y="{height + 4:.1f}">'
            f"{escape(name)}</text>"
        )
    return _svg(parts, "Bubble rate against the number of micro-batches")


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _ticks(most: float) -> list[float]:
    """Round numbers from 0 to the first that is not below ``most``."""
    if most <= 0:
        return [0.0, 0.1]
    rough = most / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(one * power for one in (1, 2, 2.5, 5, 10) if one * power >= rough)
    return [i * step for i in range(math.ceil(most / step - 1e-9) + 1)]


def _axes(
    x: Scale, x_ticks: Sequence[float], y: Scale, y_ticks: Sequence[float], label: str
) -> Iterable[str]:
    base = _HEIGHT - _BOTTOM
    right = max(x(x_ticks[-1]), _LEFT)
    for tick in y_ticks:
        yield (
            f'<line class="grid" x1="{_LEFT}" x2="{right:.1f}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/><text x="{_LEFT - 8}" y="{y(tick) + 4:.1f}" '
            f'text-anchor="end">{100 * tick:.4g} %</text>'
        )
    for tick in x_ticks:
        yield (
            f'<text x="{x(tick):.1f}" y="{base + 18}" text-anchor="middle">'
            f"{tick:.4g}</text>"
        )
    yield (
        f'<text x="{(_LEFT + right) / 2:.1f}" y="{_HEIGHT - 4}" '
        f'text-anchor="middle">{escape(label)}</text>'
    )


def _together(
    points: Mapping[str, tuple[float, float]], x: Scale, y: Scale
) -> list[tuple[list[str], float, float]]:
    """Group marks that would lie on one another."""
    found: list[tuple[list[str], float, float]] = []
    for name, (memory, bubble) in points.items():
        at, to = x(memory), y(bubble)
        for names, other, height in found:
            if abs(at - other) < 1 and abs(to - height) < 1:
                names.append(name)
                break
        else:
            found.append(([name], at, to))
    return found


def _names(
    points: Mapping[str, tuple[float, float]], x: Scale, y: Scale, chosen: str
) -> Iterable[str]:
    """Write names beside the marks, none over another."""
    taken: list[tuple[float, float, float, float]] = []
    marks = _together(points, x, y)
    for names, at, to in sorted(marks, key=lambda mark: (mark[2], mark[1])):
        text = ", ".join(names)
        width = (7.4 if chosen in names else 6.6) * len(text)
        for left in (at + 12, at - 12 - width):
            for shift in (0, -13, 13, -26, 26):
                box = (left, to + shift - 7, left + width, to + shift + 7)
                if _is_free(box, taken) and _is_free(box, _boxes(marks, at, to)):
                    break
            else:
                continue
            break
        else:
            box = (at + 12, to - 7, at + 12 + width, to + 7)
        taken.append(box)
        kind = "strong" if chosen in names else "name"
        yield (
            f'<text class="{kind}" x="{box[0]:.1f}" y="{box[3] - 3:.1f}">'
            f"{escape(text)}</text>"
        )


_Box = tuple[float, float, float, float]


def _boxes(
    marks: Iterable[tuple[list[str], float, float]], at: float, to: float
) -> list[_Box]:
    """The marks other than this one, as boxes."""
    others = [mark for mark in marks if mark[1:] != (at, to)]
    return [(x - 6, y - 6, x + 6, y + 6) for _, x, y in others]


def _is_free(box: _Box, taken: Iterable[_Box]) -> bool:
    left, top, right, bottom = box
    if left < _LEFT or right > _WIDTH or top < 0 or bottom > _HEIGHT - _BOTTOM + 2:
        return False
    return not any(
        left < other[2] and other[0] < right and top < other[3] and other[1] < bottom
        for other in taken
    )


def _same_lines(series: Series) -> dict[str, Sequence[tuple[int, float]]]:
    """Lines that lie on one another are one, with all of their names."""
    names: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name, points in series.items():
        if points:
            key = tuple((m, round(bubble, 6)) for m, bubble in points)
            names.setdefault(key, []).append(name)
    return {", ".join(own): line for line, own in names.items()}


def _spread(heights: Mapping[str, float]) -> list[tuple[str, float]]:
    """Heights of the names at the ends of lines, moved apart."""
    ordered = sorted(heights.items(), key=lambda item: item[1])
    placed: list[float] = []
    for _, height in ordered:
        placed.append(max([height, *[one + _SPACING for one in placed[-1:]]]))
    for i in range(len(placed) - 1, -1, -1):
        below = placed[i + 1] - _SPACING if i + 1 < len(placed) else _HEIGHT - _BOTTOM
        placed[i] = min(placed[i], below)
    return [(name, y) for (name, _), y in zip(ordered, placed, strict=True)]


def _svg(parts: Iterable[str], name: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" aria-label="{escape(name)}">{"".join(parts)}</svg>'
    )
