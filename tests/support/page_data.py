"""What is in a page with timelines, read back."""

import base64
import json
import re
import struct
import zlib

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.S)
_TIMES = ("wait", "lasts", "during", "after")
_NUMBERS = ("chunk", "microbatch", "chunk2", "microbatch2", "awaits", "style")


def page_data(text):
    """The data of a page's scripts."""
    (data,) = _DATA.findall(text)
    return json.loads(data)


def columns_of(panel):
    """Tuples by the name of a column: times, memory, jobs, and whom they await."""
    n, packed = sum(panel["lines"]), base64.b64decode(panel["columns"])
    values = struct.unpack(f"<{4 * n}f{6 * n}i", zlib.decompress(packed))
    names = (*_TIMES, *_NUMBERS)
    return {name: values[i * n : i * n + n] for i, name in enumerate(names)}


def boxes_in(data, panel=0):
    """Stage, start, end and name of every box of a panel."""
    panel, boxes, box = data["panels"][panel], [], 0
    columns = columns_of(panel)
    for line, n_boxes in enumerate(panel["lines"]):
        end = 0.0
        for _ in range(n_boxes):
            start = end + columns["wait"][box]
            end = start + columns["lasts"][box]
            row = {name: values[box] for name, values in columns.items()}
            name = _name(row, data["styles"][row["style"]])
            boxes.append((line % panel["stages"], start, end, name))
            box += 1
    return boxes


def _name(row, style):
    """The text of a box's job, both passes of a pair."""

    def number(column):
        return "" if row[column] < 0 else str(row[column])

    first = number("chunk"), number("microbatch")
    if style["role"] == "SEND":
        return "send"
    if not number("chunk2"):
        return style["role"].join(first)
    second = number("chunk2"), number("microbatch2")
    both = zip(style["kinds"], (first, second), strict=True)
    forward, backward = (kind.join(numbers) for kind, numbers in both)
    return f"({forward};{backward}){style['role']}"
