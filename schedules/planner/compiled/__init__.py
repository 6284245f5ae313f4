"""The inner loops of the planner, in C.

build     compiles them: for setup.py, and in a checkout whose sources have changed
binding   loads them, and passes structures and arrays to them

loops.h               what the loops share
list_scheduler.c      `search.list_scheduler`
critical_path.c       `search.critical_path`
"""
