"""Memory of compiled layers, before anything is compiled to kernels.

Read `layers` (how the compiler is asked), then `walk` (what its graphs take).
"""
