"""These tests run on the simulated device alone, in a process that loads it first."""

import sys

if "simgpu" not in sys.modules:
    collect_ignore_glob = ["*.py"]
