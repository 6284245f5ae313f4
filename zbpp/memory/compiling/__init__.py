"""Memory of compiled layers, before any kernel is built.

Read `layers` (how the compiler is asked), then `written` (what its code takes).
"""
