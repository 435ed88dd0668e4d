"""`uv run apps/ppo`."""

import signal
import sys

if __name__ == "__main__":
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports ends the process without a traceback
    from rl_app_ppo.cli.main import main

    signal.signal(signal.SIGINT, handler)
    sys.exit(main())
