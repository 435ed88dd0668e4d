"""`python -m rl_megatron_peft`; guarded, because Megatron's checkpoint writer starts a helper that imports it again."""

from __future__ import annotations

import sys

from rl_megatron_peft.cli import main

if __name__ == "__main__":
    sys.exit(main())
