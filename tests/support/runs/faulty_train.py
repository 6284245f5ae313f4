"""``torchrun faulty_train.py FAULT WORDS ..``: a command of zbpp with a fault."""

import sys

from zbpp.cli import main
from zbpp.runtime.testing import inject

if __name__ == "__main__":
    inject(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
