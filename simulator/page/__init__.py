"""One page of modes and their timelines, in one file that needs no network.

entry        what a page shows: a mode with its timelines and figures
columns      a timeline as compressed columns, and back, to the last bit
table        the table of modes
charts       small charts as SVG: bubble against memory, and against m
panels       timelines: what the scripts draw, and where
document     the page: all of the above with the style and the scripts beside it

The scripts, in the order in which the page holds them:

data.js      columns to arrays; lookups by time
draw.js      lanes: bars, or bands where bars are too thin; memory; path and messages
view.js      panels on one time axis, and what is shown
controls.js  zoom, pan, hover, switches
"""

from zbpp.simulator.page.columns import decode
from zbpp.simulator.page.document import page_data, page_text, write_page
from zbpp.simulator.page.entry import PageEntry

__all__ = ["PageEntry", "decode", "page_data", "page_text", "write_page"]
