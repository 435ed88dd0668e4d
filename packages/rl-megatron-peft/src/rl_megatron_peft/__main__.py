"""`python -m rl_megatron_peft` runs the command line.

The guard is needed: Megatron's checkpoint writer starts a process that imports this module again.
"""

from __future__ import annotations

import sys

from rl_megatron_peft.cli import main

if __name__ == "__main__":
    sys.exit(main())
