"""A page on which the planner runs: in the browser, or beside it.

answers          questions of the page and their answers, as JSON
command          `zbpp playground`
site             the files of the page; for the planner in the browser
server           a local server of the page, whose planner is this Python
playground.html  the page, with playground.css and playground.js; timelines are drawn
                 by the scripts of simulator/page
worker.js        the planner in the browser: Pyodide, off the page's own thread
"""
