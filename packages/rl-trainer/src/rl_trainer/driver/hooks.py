"""User code that is notified of events: a `Hook` under the entry points `rl_trainer.hooks`, chosen
by `trainer.hooks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rl_protocol import KVBatchMeta, RLError
from rl_protocol.errors import located_error
from rl_protocol.ports import GroupFailure
from rl_trainer.config.registry import Registry


class Hook:
    """Base class of hooks: override the events you need.

    Contract: methods are called in the driver process, on its event loop, in the order of
    `trainer.hooks`, and the loop waits for them. Return quickly, and use a thread for slow work.
    Arguments are names and numbers, never tensors, and must not be modified. An end follows its
    begin unless the run fails between them. An exception ends the run with an RLError that names
    the hook.

    Example:
        class Stopwatch(Hook):
            def on_step_end(self, step, metrics):
                print(step, metrics["timing_s/step"])
    """

    def on_train_begin(self, step: int) -> None:
        """Before the first step. `step` steps are done already: 0, or those of the resumed
        checkpoint.
        """

    def on_train_end(self, step: int) -> None:
        """After the last step and the last checkpoint."""

    def on_step_begin(self, step: int) -> None:
        """Before the step."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """After the step, its validation and the beginning of its checkpoint, with all logged
        metrics. A validation that runs beside the next step ends later, and its metrics are only in
        `on_validate_end`.
        """

    def on_sample_begin(self, step: int, num_prompts: int) -> None:
        """Before prompts are rolled out for training; several times per step if groups are
        filtered.
        """

    def on_sample_end(self, step: int, rows: KVBatchMeta) -> None:
        """After their trajectories are in the data plane: keys and tags (`version`, `prompt_len`,
        `response_len`).
        """

    def on_rollout_failure(self, step: int, failures: Sequence[GroupFailure], replaced: int) -> None:
        """After prompts were rolled out, in training or validation, if sessions failed.

        `failures` are the failed attempts, and `replaced` prompts were given up for others. Where
        the failure ends the run, the error says so instead.
        """

    def on_reward_failure(self, step: int, failed: int, scored: int, example: str) -> None:
        """After the reward function failed on `failed` of `scored` trajectories, which have no
        score.

        `example` describes the first failure of each kind.
        """

    def on_validate_begin(self, step: int) -> None:
        """Before the validation set is rolled out; step 0 is before training."""

    def on_validate_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """After validation, with its metrics val-core/* and val-aux/*."""

    def on_data_lost(self, step: int, attempt: int, attempts: int) -> None:
        """After rows were lost with a storage unit, and sampling or validation is repeated.

        `attempt` is 2, 3, ... of `attempts`.
        """

    def on_checkpoint_begin(self, step: int) -> None:
        """Before the state is copied."""

    def on_checkpoint_end(self, step: int, folder: Path) -> None:
        """After the checkpoint of that step is published, which can be some steps later."""


HOOKS: Registry[Hook] = Registry("TrainerParts.hooks", "rl_trainer.hooks", Hook, {}, {})
"""Hooks of installed packages, by name."""


def named_hooks(names: Iterable[str]) -> dict[str, Hook]:
    """The hooks of those names, in order.

    Raises:
        ConfigError: a name is unknown, or its object is no Hook.
    """
    return {name: HOOKS.get(name) for name in dict.fromkeys(names)}


def notify(hooks: Mapping[str, Hook], event: str, *facts: object) -> None:
    """Call that method of every hook.

    Raises:
        RLError: a hook raised an exception; names the hook.
    """
    for name, hook in hooks.items():
        try:
            getattr(hook, event)(*facts)
        except Exception as error:
            raise RLError(
                f"The hook {name!r} ({type(hook).__module__}.{type(hook).__qualname__}) failed in {event}: "
                f"{located_error(error)}. Repair it, or take it out of TrainerParts.hooks."
            ) from error
