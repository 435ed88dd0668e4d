"""What holds for every test, however and on whatever machine pytest was started."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# Property tests run on shared machines: how long one example takes says nothing. At a desk every run looks for new counter-examples;
# in CI the examples are the same for the same code, so that a red run is about the change and can be repeated.
settings.register_profile(
    "shared", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shared")

# Ray's workers run in the environment of the tests. Where pytest was started by `uv run`, Ray would have uv make one for each of them, which takes
# a minute; it looks at this when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

# A shell starts its background jobs with SIGINT ignored, and so would be every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
