"""``python -m zbpp`` is the ``zbpp`` command."""

import sys

from zbpp.cli import main

if __name__ == "__main__":
    sys.exit(main())
