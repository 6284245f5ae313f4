"""What is in a page with timelines, read back."""

import base64
import json
import re
import struct
import tempfile
import zlib
from pathlib import Path

from zbpp.core import Pair
from zbpp.simulator import write_page

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)
_COLUMNS = (
    "wait",
    "lasts",
    "during",
    "after",
    "chunk",
    "microbatch",
    "chunk2",
    "microbatch2",
    "awaits",
    "style",
)


def page_text(entries, **options):
    """The text of a page, through its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.html"
        write_page(entries, path, **options)
        return path.read_text(encoding="utf-8")


def page_data(text):
    """The data of a page's scripts."""
    (data,) = _DATA.findall(text)
    return json.loads(data)


def columns_of(panel):
    """The columns of a panel, times added up."""
    n, packed = sum(panel["lines"]), base64.b64decode(panel["columns"])
    values = struct.unpack(f"<{4 * n}f{6 * n}i", zlib.decompress(packed))
    columns = {name: values[i * n : i * n + n] for i, name in enumerate(_COLUMNS)}
    starts, ends, first = [], [], 0
    for boxes in panel["lines"]:
        end = 0.0
        for i in range(first, first + boxes):
            starts.append(end + columns["wait"][i])
            end = starts[-1] + columns["lasts"][i]
            ends.append(end)
        first += boxes
    return columns | {"start": starts, "end": ends}


def boxes_in(data, panel):
    """For each line of a panel the texts, starts and ends of its boxes."""
    columns, lines, first = columns_of(panel), [], 0
    for boxes in panel["lines"]:
        line = []
        for i in range(first, first + boxes):
            name = _name(columns, data["styles"][columns["style"][i]], i)
            line.append((name, columns["start"][i], columns["end"][i]))
        lines.append(line)
        first += boxes
    return lines


def boxes_of_timeline(timeline):
    """The same of a timeline without sends, to be compared."""
    pairs = [[s for s in row if isinstance(s.job, Pair)] for row in timeline.rows]
    beside = timeline.collectives or (pairs if any(pairs) else ())
    lines = (*timeline.rows, *beside)
    origin = min(slot.start for line in lines for slot in line)
    return [
        [
            (
                str(getattr(slot.job, "of", slot.job)),
                slot.start - origin,
                slot.end - origin,
            )
            for slot in line
        ]
        for line in lines
    ]


def _name(columns, style, box):
    """The text of a box's job, both passes of a pair."""

    def number(column):
        return "" if columns[column][box] < 0 else str(columns[column][box])

    first = number("chunk"), number("microbatch")
    if not number("chunk2"):
        return style["role"].join(first)
    both = zip(
        style["kinds"], (first, (number("chunk2"), number("microbatch2"))), strict=True
    )
    forward, backward = (kind.join(numbers) for kind, numbers in both)
    return f"({forward};{backward}){style['role']}"


def same_boxes(found, expected):
    """True if boxes are alike, but for single precision of their durations."""
    close = max(end for line in expected for _, _, end in line) * 1e-6
    return [[name for name, *_ in line] for line in found] == [
        [name for name, *_ in line] for line in expected
    ] and all(
        abs(a - b) <= close
        for one, two in zip(found, expected, strict=True)
        for (_, *times), (_, *others) in zip(one, two, strict=True)
        for a, b in zip(times, others, strict=True)
    )
