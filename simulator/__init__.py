"""Time a schedule, measure it, draw it; matplotlib is loaded only to draw.

engine          from orders and costs to a timeline, of one iteration or of several;
                the time of a step among many, and of one that is rolled back
arguments       a Plan for a Schedule; what is no timeline is refused
metrics         figures of a timeline: spans, bubble rate, memory
job_graph       the jobs and their waits as a graph of networkx
critical_path   the chain of jobs that fixed the time; who sends to whom
boxes           a timeline as a list of boxes: what all of these draw:
plot            pictures of timelines and of modes (by matplotlib: figures)
svg             shapes of a page
tables          figures in a terminal, or on a page
entries         a mode on a page: figures and timelines
page            one HTML file to zoom in
trace           files for Perfetto
"""

from zbpp.core import lower_bound, lower_bounds
from zbpp.simulator.critical_path import (
    CriticalPath,
    Message,
    critical_path,
    messages,
)
from zbpp.simulator.engine import (
    expected_step_time,
    join,
    rollback_time,
    simulate,
    simulate_iterations,
    steady_step_time,
    with_rollback,
)
from zbpp.simulator.entries import PageEntry
from zbpp.simulator.job_graph import job_graph
from zbpp.simulator.metrics import (
    bubble_rate,
    idle,
    makespan,
    memory_over_time,
    overhead,
    peak_memory,
    sending,
    span,
    stage_span,
    step_time,
    work,
)
from zbpp.simulator.page import write_page
from zbpp.simulator.plot import plot, plot_comparison
from zbpp.simulator.trace import trace_events, write_trace

__all__ = [
    "CriticalPath",
    "Message",
    "PageEntry",
    "bubble_rate",
    "critical_path",
    "expected_step_time",
    "idle",
    "job_graph",
    "join",
    "lower_bound",
    "lower_bounds",
    "makespan",
    "memory_over_time",
    "messages",
    "overhead",
    "peak_memory",
    "plot",
    "plot_comparison",
    "rollback_time",
    "sending",
    "simulate",
    "simulate_iterations",
    "span",
    "stage_span",
    "steady_step_time",
    "step_time",
    "trace_events",
    "with_rollback",
    "work",
    "write_page",
    "write_trace",
]
