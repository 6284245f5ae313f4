"""``torchrun faulty_train.py FAULT WORDS ..``: a command of zbpp with a fault."""

import sys

from faults import install

from zbpp.cli import main

if __name__ == "__main__":
    install(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
