"""Timelines of pages and of SVG pictures, read back."""

import base64
import re
import zlib
from html import unescape

_SHAPE = re.compile(
    r'data-name="([^"]*)" data-numbers="([^"]*)"[^>]* d="([^"]*)"', re.DOTALL
)
_BOX = re.compile(r"m(\S+) ([^h]+)h([^v]+)v[^h]+")


def timelines_of(text):
    """The elements of a page's timelines."""
    packed = re.findall(r'id="packed">([^<]*)<', text)
    return zlib.decompress(base64.b64decode(packed[0])).decode() if packed else ""


def panels_of(text):
    """The elements of each timeline of a page by its title."""
    panels = timelines_of(text).split("<details")[1:]
    return [(unescape(re.search("<b>(.*?)</b>", one)[1]), one) for one in panels]


def boxes_in(element):
    """Stage, start, end and name of every box."""
    boxes = []
    for name, numbers, path in _SHAPE.findall(element):
        x = y = 0.0
        rows = zip(_BOX.findall(path), numbers.split(","), strict=True)
        for (across, down, width), microbatches in rows:
            x, y = x + float(across), y + float(down)
            full = unescape(name)
            for microbatch in microbatches.split():
                full = full.replace("*", microbatch, 1)
            boxes.append((int(y), x, x + float(width), re.split(r" of |\.", full)[0]))
    return boxes
