"""Answers of the data as trajectories, for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rl_protocol import ConfigError
from rl_trainer.data import PromptRow
from rl_trainer.rollout.session_turns import Tokenizer, Trajectory

GROUND_TRUTH = "ground_truth"
"""Key of the answer that is the text a response is compared with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """Reads the answer of a row.

    Attributes:
        tokenizer: of the policy.
        eos_id: the token that ends a response.
        key: GROUND_TRUTH, or the name of a text in the row's extra_info.
        given: (data source, n) -> how many of the n responses to a prompt are its answer, the last.
    """

    tokenizer: Tokenizer
    eos_id: int
    key: str = GROUND_TRUTH
    given: Callable[[str, int], int] = lambda _source, _n: 1

    def answer(self, row: PromptRow) -> Sequence[int]:
        """The tokens of the row's answer, with the end of the response.

        Raises:
            ConfigError: the row has no such text.
        """
        return (*self.tokenizer.encode(self.text(row)), self.eos_id)

    def text(self, row: PromptRow) -> str:
        """The row's answer.

        Raises:
            ConfigError: the row has no such text.
        """
        text = row.ground_truth if self.key == GROUND_TRUTH else row.extra_info.get(self.key)
        if not isinstance(text, str) or not text:
            found = ", ".join([GROUND_TRUTH, *map(str, row.extra_info)])
            raise ConfigError(
                f"Demonstrations.key={self.key!r} must name a text of each row: {GROUND_TRUTH}, or a key of extra_info; got {text!r} in a row "
                f"of {row.data_source!r} that has {found}."
            )
        return text

    def trajectory(self, row: PromptRow, version: int, longest: int) -> Trajectory:
        """The answer as a trajectory.

        Args:
            row: the prompt.
            version: of the weights that the rollout engine has.
            longest: most tokens of a response.

        Raises:
            ConfigError: the row has no answer, or a longer one.
        """
        ids = tuple(self.answer(row))
        if len(ids) > longest:
            raise ConfigError(
                f"RolloutConfig.response_length={longest} must hold every answer of the training data with AlgorithmConfig.sft_coef above 0; a "
                f"row of {row.data_source!r} has an answer of {len(ids)} tokens. Raise it, or leave the row out."
            )
        return Trajectory(
            response_ids=ids,
            response_mask=(True,) * len(ids),
            log_probs=(0.0,) * len(ids),
            weight_version=version,
        )
