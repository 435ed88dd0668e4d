"""A trajectory in the making: token ids that only grow. What the policy made is kept as it was sampled and never becomes text and ids again."""

from __future__ import annotations

from collections.abc import Sequence

from rl_protocol.ports import Generation
from rl_trainer.course import Course
from rl_trainer.sessions import Generate, Trajectory
from rl_trainer.turns import parts_of_turn


class Transcript:
    """What the policy saw and wrote after a prompt.

    Lifecycle: `turn` has the policy write, `observe` tells it something, in any order and as often as wanted; `trajectory` is what can be
    trained on. A session that starts its context anew makes another one.

    Args:
        prompt_ids: [P] token ids of the prompt.
        generate: how the policy is asked.
    """

    def __init__(self, prompt_ids: Sequence[int], generate: Generate) -> None:
        self._prompt = tuple(prompt_ids)
        self._generate = generate
        self._ids: list[int] = []
        self._made: list[bool] = []
        self._log_probs: list[float] = []
        self._versions: list[int] = []

    @property
    def left(self) -> int:
        """Tokens the trajectory may still have."""
        return self._generate.response_length - len(self._ids)

    async def turn(self, max_tokens: int = 0) -> Generation:
        """Have the policy write: until it ends its turn, or has written `max_tokens` (0: what is left, of which there must be something).

        A turn that an update of the weights aborts is continued with the new ones. What is returned is the whole turn, with the oldest of
        its weight versions.
        """
        budget = min(max_tokens or self.left, self.left)
        assert budget > 0, "a turn needs room for a token"
        context = (*self._prompt, *self._ids)
        parts, finish = await parts_of_turn(lambda made, left: self._generate((*context, *made), left), budget)
        turn = Generation(
            response_ids=tuple(token for part in parts for token in part.response_ids),
            log_probs=tuple(value for part in parts for value in part.log_probs),
            finish_reason=finish,
            weight_version=min(part.weight_version for part in parts),
        )
        self._add(turn.response_ids, turn.log_probs, made=True)
        self._versions.append(turn.weight_version)
        return turn

    def observe(self, ids: Sequence[int]) -> None:
        """Tell the policy something. It is not trained on having said it."""
        self._add(ids, [0.0] * len(ids), made=False)

    def _add(self, ids: Sequence[int], log_probs: Sequence[float], *, made: bool) -> None:
        self._ids += ids
        self._log_probs += log_probs
        self._made += [made] * len(ids)

    def trajectory(self, course: Course | None = None) -> Trajectory:
        """All of it; there must have been a turn."""
        return Trajectory(
            response_ids=tuple(self._ids),
            made=tuple(self._made),
            log_probs=tuple(self._log_probs),
            weight_version=min(self._versions),
            course=course,
        )
