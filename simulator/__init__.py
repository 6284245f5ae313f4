"""Time a schedule, measure it, draw it; matplotlib is loaded only to draw.

engine          from orders and costs to a timeline, of one iteration or of several;
                the time of a step among many, and of a step that is rolled back;
                jobs and waits as a graph of networkx, and the chain that fixed the time
metrics         figures of a timeline: spans, bubble rate, memory
boxes           a timeline as a list of boxes: what all of these draw:
plot            pictures of timelines and of modes, by matplotlib
page            one HTML file to zoom in; tables, for a terminal too
trace           files for Perfetto
"""

from zbpp.core import lower_bound, lower_bounds
from zbpp.simulator.engine import (
    CriticalPath,
    critical_path,
    job_graph,
    join,
    simulate,
    simulate_iterations,
    steady_step_time,
    with_rollback,
)
from zbpp.simulator.metrics import (
    bubble_rate,
    idle,
    makespan,
    memory_over_time,
    peak_memory,
    span,
    stage_span,
    step_time,
    work,
)
from zbpp.simulator.page import Table, charts_html, write_page
from zbpp.simulator.plot import plot, plot_comparison
from zbpp.simulator.trace import write_trace

__all__ = [
    "CriticalPath",
    "Table",
    "bubble_rate",
    "charts_html",
    "critical_path",
    "idle",
    "job_graph",
    "join",
    "lower_bound",
    "lower_bounds",
    "makespan",
    "memory_over_time",
    "peak_memory",
    "plot",
    "plot_comparison",
    "simulate",
    "simulate_iterations",
    "span",
    "stage_span",
    "steady_step_time",
    "step_time",
    "with_rollback",
    "work",
    "write_page",
    "write_trace",
]
