"""Code of users that is told what the loop does: a `Hook` installed under the entry points `rl_trainer.hooks`, chosen by `trainer.hooks`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rl_protocol import KVBatchMeta, RLError
from rl_trainer.algorithms.registry import Registry


class Hook:
    """Override what you want to hear of; what is not overridden does nothing.

    Contract: every method is called in the driver process, on its event loop, in the order of `trainer.hooks`, and the loop waits for it:
    return quickly, and start a thread for anything that takes time. What is passed is names and numbers, never tensors, and is not to be
    changed. An end follows its begin unless the run fails between them. An exception ends the run with an RLError that names the hook.

    Example:
        class Stopwatch(Hook):
            def on_step_end(self, step, metrics):
                print(step, metrics["timing_s/step"])
    """

    def on_train_begin(self, step: int) -> None:
        """Before the first step; `step` are done already: 0, or those of the checkpoint that the run goes on from."""

    def on_train_end(self, step: int) -> None:
        """After the last step and the last checkpoint."""

    def on_step_begin(self, step: int) -> None:
        """Before anything of the step."""

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """After its validation and the begin of its checkpoint, with everything that is logged of the step."""

    def on_sample_begin(self, step: int, num_prompts: int) -> None:
        """Before prompts are rolled out to be trained on; more than once per step where groups are filtered."""

    def on_sample_end(self, step: int, rows: KVBatchMeta) -> None:
        """When their trajectories are in the data plane: keys and tags (`version`, `prompt_len`, `response_len`)."""

    def on_reward_failure(self, step: int, failed: int, scored: int, example: str) -> None:
        """When the reward function has failed on `failed` of `scored` trajectories, which have no score; `example` says how on the first."""

    def on_validate_begin(self, step: int) -> None:
        """Before the validation set is rolled out; step 0 is before training."""

    def on_validate_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """With its metrics, val-core/* and val-aux/*."""

    def on_data_lost(self, step: int, attempt: int, attempts: int) -> None:
        """When a storage unit took rows with it, and sampling, or the validation, of this step begins again: attempt 2, 3 ... of `attempts`."""

    def on_checkpoint_begin(self, step: int) -> None:
        """Before the state is copied."""

    def on_checkpoint_end(self, step: int, folder: Path) -> None:
        """When the checkpoint of that step is whole and published, which may be some steps later."""


HOOKS: Registry[Hook] = Registry("trainer.hooks", "rl_trainer.hooks", Hook, {}, {})
"""By name: those of installed packages, instances of Hook."""


def named_hooks(names: str) -> dict[str, Hook]:
    """The hooks of comma-separated names, in order.

    Raises:
        ConfigError: there is none of a name, or it is no Hook.
    """
    return {name: HOOKS.get(name) for name in dict.fromkeys(part.strip() for part in names.split(",") if part.strip())}


def tell(hooks: Mapping[str, Hook], event: str, *facts: object) -> None:
    """Call that method of every hook.

    Raises:
        RLError: one of them raised; names it. Whatever an installed package raises is its failure, and is never passed over.
    """
    for name, hook in hooks.items():
        try:
            getattr(hook, event)(*facts)
        except Exception as error:
            raise RLError(
                f"The hook {name!r} ({type(hook).__module__}.{type(hook).__qualname__}) failed in {event}: "
                f"{type(error).__name__}: {error}. Repair it, or take it out of trainer.hooks."
            ) from error
