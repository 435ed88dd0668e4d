"""`python -m rl_docs`."""

import sys

from rl_docs.cli import main

if __name__ == "__main__":
    sys.exit(main())
