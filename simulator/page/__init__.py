"""One page of modes and their timelines, in one file that needs no network.

entry         what a page shows: a mode with its timelines and figures; their table
panels        timelines: what the scripts draw, and where
document      the page: all of the above with charts, style and scripts
timeline.js   one timeline: arrays, lookups by time, the picture on a canvas
view.js       panels on one time axis: zoom, pan, hover, switches
"""

from zbpp.simulator.page.document import write_page
from zbpp.simulator.page.entry import PageEntry

__all__ = ["PageEntry", "write_page"]
