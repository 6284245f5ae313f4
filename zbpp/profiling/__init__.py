"""Measure on the real devices what a plan needs to know, and leave no trace of it.

    kept         everything that training depends on, put back when the profile ends
    stopwatch    one clock for CPUs and GPUs; means, medians and quartiles
    capture      one micro-batch through all chunks: what each of them is given
    passes       F, B and W of every chunk, and of every layer as a chunk of its own
    rehearsal    the passes of whole steps, with their messages
    steps        O and V of every stage, norms, and the sum over the stages
    links        delay and bandwidth between neighbours
    collectives  gathers and sums of replicas, and the link between them
    memory       what passes leave and need by the allocator's count, and a stage holds
    measure      all of it, on every rank
    join         what the ranks have found, layers scaled to their chunks
    profile      the result: costs per layer, a table, JSON

    window       costs from the steps of a training that goes on
    step_times   times of passes, gaps of the host and waits for messages in steps:
                 of a rehearsal, and of that training
    prediction   the simulated step beside the measured one, at the end of a run

Read `profile`, then `measure`.
"""

from zbpp.profiling.profile import ChunkProfile, Profile

__all__ = ["ChunkProfile", "Profile"]
