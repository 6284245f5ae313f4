"""Run a module or a script on the simulated device: ``python -m simgpu -m pytest``."""

import runpy
import sys

import simgpu  # noqa: F401

if __name__ == "__main__":
    sys.argv.pop(0)
    if sys.argv[:1] == ["-m"]:
        sys.argv.pop(0)
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
