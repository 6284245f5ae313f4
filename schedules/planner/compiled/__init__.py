"""The inner loops of the planner in C, for speed; plans are the same without them.

`library` loads them, if they were built when zbpp was installed (a C compiler is all
that takes). `loops.h` says what they share; each loop is that of the Python file of the
same name in `search`, which runs where there is no compiler, or where the environment
variable ``ZBPP_COMPILED`` is 0:

    list_scheduler.c   list_scheduler.py
    critical_path.c    critical_path.py
"""
