"""The inner loops of the planners in C, for speed; plans are the same without them.

`library` loads them, if they were built when zbpp was installed (a C compiler is all
that takes). `loops.h` says what they share; each loop names the Python function that it
stands for, and that runs where there is no compiler, or where the environment variable
``ZBPP_COMPILED`` is 0:

    line.c         list scheduling of a line         single/list_scheduler.py
    placement.c    the same for any placement        multi/list_scheduler.py
    weights.c      the W's of a given order          multi/place_weights.py
    moves.c        times, and the critical path      multi/timing.py, critical_path.py
"""
