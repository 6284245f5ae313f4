"""Run scripts in one process, one after the other, as their imports cost seconds.

python in_turn.py script.py argument ... -- script.py argument ...
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    calls: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        if word == "--":
            calls.append([])
        else:
            calls[-1].append(word)
    for call in calls:
        sys.argv = call
        sys.path[0] = str(Path(call[0]).parent)  # as `python script.py` does
        print("== in turn", flush=True)
        runpy.run_path(call[0], run_name="__main__")
