"""A page on which the planner compares modes live.

answers          questions of the page and their answers, as JSON
server           a server for this machine alone: the page's files, and answers
command          `zbpp playground`
playground.html  the page, with playground.css and playground.js; timelines are drawn
                 by simulator/page.js
"""
