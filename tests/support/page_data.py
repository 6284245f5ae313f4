"""Timelines of pages, read back."""

import base64
import json
import re
import zlib


def panels_of(text):
    """The data of each timeline of a page; times in its unit."""
    packed = re.findall(r'id="packed">([^<]*)<', text)
    if not packed:
        return []
    data = json.loads(zlib.decompress(base64.b64decode(packed[0])))
    return [panel | {"unit": data["unit"]} for panel in data["panels"]]


def boxes_in(panel):
    """Stage, start, end and name of every box."""
    boxes, unit = [], panel["unit"]
    for line in panel["lines"]:
        end = 0
        for gap, time, name in zip(
            line["gaps"], line["times"], line["names"], strict=True
        ):
            start, end = end + gap, end + gap + time
            name = re.split(r" of |\.", name)[0]
            boxes.append((line["stage"], start * unit, end * unit, name))
    return boxes
