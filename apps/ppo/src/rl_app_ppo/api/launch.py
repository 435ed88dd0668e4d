"""Run a configuration: what the command line and `train()` share."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager

from rich.console import Console
from rich.text import Text

from rl_app_ppo.api.event_loop import interrupts_deferred
from rl_app_ppo.api.result import TrainResult
from rl_app_ppo.cluster.environment import compute_settings, environment, ray_settings
from rl_app_ppo.cluster.local.fork_server import ForkServer, close_early, fork_server
from rl_app_ppo.config.schema import LOCAL, AppConfig
from rl_app_ppo.garbage_collection import begin_gc
from rl_app_ppo.outputs.startup_times import Startup
from rl_app_ppo.worker.preloading import worker_modules
from rl_ckpt_engine import PluginPolicy


@contextmanager
def launched(
    config: AppConfig,
    out: Console,
    variables: Mapping[str, str] | None = None,
    *,
    before_s: float | None = None,
) -> Generator[tuple[Startup, ForkServer | None]]:
    """The environment and the fork server of the processes of a configuration; see `launch`.

    Yields:
        The clock of the start, and the fork server; None: with ray.address=ADDRESS.
    """
    local = config.ray.address == LOCAL
    settings = ray_settings(local=local) | compute_settings(config.trainer.threads_per_worker)
    settings |= variables or {}
    startup = Startup(
        lambda line: out.print(Text(line), soft_wrap=True),
        before_s=before_s,
        when_done=None if before_s is None else begin_gc,  # a caller's objects are not to be exempt
    )
    with environment(settings), ExitStack() as stack:
        stack.callback(startup.end)
        if local:
            yield startup, stack.enter_context(closing(fork_server(settings, worker_modules(config))))
        else:
            close_early()
            yield startup, None


def launch(
    config: AppConfig,
    plugins: PluginPolicy,
    out: Console,
    variables: Mapping[str, str] | None = None,
    *,
    before_s: float | None = None,
    steps_only: bool = False,
) -> TrainResult:
    """Train as configured, and print progress and outcome.

    Args:
        config: the configuration of the run.
        plugins: which plug-ins of the weight synchronization the operator allows.
        out: where to print.
        variables: environment variables of the run, besides Ray's.
        before_s: seconds since the command was given; None: the call is the start.
        steps_only: as in RunPlan.

    Raises:
        RLError: as `training.run_training`.
        KeyboardInterrupt: the run was interrupted; its processes have ended.
    """
    with launched(config, out, variables, before_s=before_s) as (startup, fork_server):
        with startup.phase("imports", "importing libraries"), interrupts_deferred():
            # imports Ray, which reads the settings above at import
            from rl_app_ppo.api.training import run_training
        return run_training(config, plugins, out, startup, fork_server, steps_only=steps_only)
