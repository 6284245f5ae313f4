"""Orders for given times and a memory limit, on any placement of chunks on stages.

`placement` plans passes in one piece, and those in parts on two lanes; `balance`
splits layers. Five ideas make plans good:

1. Passes are numbers of a chain, and micro-batches are alike, so an order is a row of
   numbers that can be timed, changed and compared a million times (`problem`).
2. A simulation that decides as it goes, and looks ahead to what is sure to arrive,
   gives a good plan in one run. Different requests need different settings of its
   rules, some thirty in all, or hand-made orders (`list_scheduler`, `seeds`).
3. Only a change on the critical path can shorten a plan: moves of single passes there,
   every result that is not worse taken (`critical_path`).
4. Where no such move helps, moves that are worse for a while do (`travel`).
5. A search stops at a lower bound (`zbpp.core.bounds`), and gives up a run whose span
   is already too long.

The loops of 2 and 3 are in C (`compiled`). `zbpp.planning` has the modes, and the
choice of `auto`.
"""
