"""Gives a program and all that it starts the simulated GPU.

PYTHONPATH=tests/simgpu/everywhere:tests python script.py
"""

import simgpu  # noqa: F401
