"""Times of layers and steps on the real devices, which plans and predictions need.

    means        means and quartiles of times
    steps        passes, gaps of the host and waits for messages in steps; their costs
    links        delay and bandwidth between neighbours, and the sum over the stages
    alone        every layer as a separate chunk, on its inputs of a step
    join         the measurements of all ranks: layers scaled to their chunks
    profile      the result: costs per layer, and a table
    prediction   the simulated step next to the measured one, at the end of a run

`zbpp.diagnostics` calls them: `measured_costs`, `profile`, `prediction`.
"""

from zbpp.profiling.profile import Profile

__all__ = ["Profile"]
