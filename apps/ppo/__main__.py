"""`uv run apps/ppo`."""

import sys

from rl_app_ppo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
