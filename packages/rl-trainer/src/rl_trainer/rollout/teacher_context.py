"""What a teacher sees before a prompt, and the policy does not, for self-distillation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl_trainer.config.algorithm import ANSWER
from rl_trainer.data import PromptRow
from rl_trainer.rollout.demonstrations import Demonstrations


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherContext:
    """Writes the teacher's prompts.

    Attributes:
        text: what precedes the prompt, in which ANSWER stands for the answer of the row. It may
            name special tokens, such as those around a system message.
        answers: reads the answers, and has the tokenizer.
    """

    text: str
    answers: Demonstrations

    def prompt(self, row: PromptRow) -> Sequence[int]:
        """The token ids of the teacher's prompt: the context, and the prompt of the policy.

        Raises:
            ConfigError: the context has an answer, and the row has none.
        """
        context = self.text
        if ANSWER in context:
            context = context.replace(ANSWER, self.answers.text(row))
        return (*self.answers.tokenizer.encode(context), *row.prompt_ids)
