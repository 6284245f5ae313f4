"""Two charts of modes: bubble against memory, and against micro-batches.

    bubble |  o 1F1B                 bubble |\\
           |      o ZBH1                    | \\____ 1F1B
           |           (o) auto             |\\_____ ZBH1
           |_________________ memory        |________ m
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from zbpp.simulator.plot import nice_step, write_picture
from zbpp.simulator.svg import Area, Bars, Curve, Dot, Picture, Text

__all__ = ["plot_comparison"]

_CYCLE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("", "6 3", "2 2")
_WIDTH, _HEIGHT = 420.0, 300.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 90.0, 14.0, 44.0
_LINE = 11.0  # height of a label

Points = Mapping[str, tuple[float, float]]
Series = Mapping[str, Sequence[tuple[int, float]]]


def plot_comparison(
    points: Points,
    series: Series,
    path: str | Path | None = None,
    *,
    chosen: str = "auto",
    unit: str = "",
    limit: float | None = None,
) -> Picture:
    """Draw both charts side by side, or the one that has data.

    Args:
        points: for each mode its peak memory and bubble rate (0 to 1).
        series: for each mode pairs of micro-batches and bubble rate.
        path: of a file to write: .svg, or by matplotlib .png and .pdf.
        chosen: the mode that has a ring.
        unit: of the memory.
        limit: of the memory, a dashed line.

    Returns:
        The picture, which notebooks show.

    Raises:
        RequestError: matplotlib is missing, the suffix names no known format, or
            the file cannot be written.
    """
    charts = []
    if points:
        charts.append(_scatter(points, chosen, f" ({unit})" if unit else "", limit))
    if series:
        charts.append(_lines(series))
    areas, marks = [], []
    for number, chart in enumerate(charts):
        shift = number * _WIDTH
        areas += [area._replace(x=area.x + shift) for area in chart.areas]
        marks += [mark._replace(x=mark.x + shift) for mark in chart.marks]
    picture = Picture(len(charts) * _WIDTH, _HEIGHT, areas, marks)
    if path is not None:
        write_picture(picture, path)
    return picture


class _Chart:
    """A chart with the bubble rate upward; ``x`` scales its other axis to 0 to 1."""

    def __init__(self, x: Callable[[float], float], worst: float, label: str) -> None:
        self._x, self._worst = x, 1.1 * worst or 1.0
        self._width = _WIDTH - _LEFT - _RIGHT
        self.shapes: list[Bars | Curve] = []
        middle = _LEFT + self._width / 2
        title = Text(_LEFT, 6, "bubble rate (%)")
        self.marks = [title, Text(middle, _HEIGHT - 8, label, anchor="middle")]
        step = nice_step(self._worst / 5)
        for k in range(int(self._worst / step) + 1):
            _, y = self.at(0.0, k * step)
            line = [(0.0, y), (_WIDTH, y)]
            self.shapes.append(Curve("line" if k else "muted", line, 0.8))
            text = Text(_LEFT - 6, y, f"{100 * k * step:.4g}", anchor="end")
            self.marks.append(text)

    def at(self, value: float, bubble: float) -> tuple[float, float]:
        """Where a value is, in points."""
        up = (_HEIGHT - _TOP - _BOTTOM) * bubble / self._worst
        return _LEFT + self._width * self._x(value), _HEIGHT - _BOTTOM - up

    def tick(self, value: float) -> None:
        """Write a value below the chart."""
        x, y = self.at(value, 0.0)
        self.marks.append(Text(x, y + 11, f"{value:.6g}", anchor="middle"))

    def picture(self, dots: Iterable[Dot | Text]) -> Picture:
        """The chart, with marks above its lines."""
        view = (_LEFT, _TOP, self._width, _HEIGHT - _TOP - _BOTTOM + 1)
        area = Area(*view, view, self.shapes)
        return Picture(_WIDTH, _HEIGHT, [area], [*self.marks, *dots])


def _scatter(points: Points, chosen: str, unit: str, limit: float | None) -> Picture:
    most = 1.08 * max(limit or 0.0, *(memory for memory, _ in points.values())) or 1.0
    worst = max(bubble for _, bubble in points.values())
    chart = _Chart(lambda memory: memory / most, worst, f"peak memory of a stage{unit}")
    step = nice_step(most / 6)
    for k in range(int(most / step) + 1):
        chart.tick(k * step)
    if limit is not None:
        edge = [chart.at(limit, 0.0), (chart.at(limit, 0.0)[0], _TOP)]
        chart.shapes.append(Curve("ink", edge, 1.0, "5 4"))
    modes: dict[tuple[float, float], list[str]] = {}
    for mode, (memory, bubble) in points.items():
        x, y = chart.at(memory, bubble)
        modes.setdefault((round(x, 3), round(y, 3)), []).append(mode)
    marks: list[Dot | Text] = [Dot(x, y, 3.5, _CYCLE[0]) for x, y in modes]
    marks += [Dot(*at, 6.5, "ink", True) for at in modes if chosen in modes[at]]
    names = {at: ", ".join(members) for at, members in sorted(modes.items())}
    return chart.picture([*marks, *_labels(names)])


def _labels(names: Mapping[tuple[float, float], str]) -> Iterator[Text]:
    """Labels beside their dots, moved up or down until none overlap."""
    taken = [(x - 5, x + 5, y) for x, y in names]
    for (x, y), name in names.items():
        label = Text(x + 9, y, name, 8.5)
        for k in range(40):
            place = y + _LINE / 2 * (k // 2) * (-1 if k % 2 else 1)
            if _TOP < place < _HEIGHT - _BOTTOM and not any(
                label.x < right
                and left < label.x + label.width
                and abs(place - level) < _LINE
                for left, right, level in taken
            ):
                label = label._replace(y=place)
                break
        taken.append((label.x, label.x + label.width, label.y))
        yield label


def _lines(series: Series) -> Picture:
    counts = sorted({m for points in series.values() for m, _ in points})
    low, high = math.log2(counts[0]), math.log2(counts[-1])
    worst = max(bubble for points in series.values() for _, bubble in points)
    chart = _Chart(
        lambda m: (math.log2(m or counts[0]) - low) / (high - low or 1.0),
        worst,
        "micro-batches in a step",
    )
    for m in counts:
        chart.tick(m)
    names: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for mode, points in series.items():  # equal lines are one
        names.setdefault(tuple((m, round(b, 6)) for m, b in points), []).append(mode)
    marks: list[Text] = []
    for number, (line, modes) in enumerate(names.items()):
        colour = _CYCLE[number % len(_CYCLE)]
        dashes = _DASHES[number // len(_CYCLE) % len(_DASHES)]
        chart.shapes.append(Curve(colour, [chart.at(*at) for at in line], 1.6, dashes))
        for name in modes:
            y = _TOP + _LINE * (len(marks) + 1)
            x = _WIDTH - _RIGHT + 8
            marks.append(Text(x, y, name, 8.5, colour=colour, weight="bold"))
    return chart.picture(marks)
