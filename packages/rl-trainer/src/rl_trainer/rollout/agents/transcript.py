"""A trajectory under construction. Generated token ids are never decoded and encoded again."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence

from rl_protocol import KeptSets
from rl_protocol.batch.routed_experts import ExpertIds, join_routed
from rl_protocol.ports import Generation
from rl_trainer.rollout.partial_generation import generate_turn
from rl_trainer.rollout.session_turns import Generate, Trajectory, stop_check
from rl_trainer.rollout.token_versions import version_runs
from rl_trainer.rollout.trajectory_stats import RolloutStats


class Transcript:
    """The tokens that the policy saw and wrote after a prompt.

    Lifecycle: call `turn` (the policy writes) and `observe` (it reads) in any order, then
    `trajectory`. A session that resets its context creates another transcript.

    Args:
        prompt_ids: [P] token ids of the prompt.
        generate: how the policy is called.
    """

    def __init__(self, prompt_ids: Sequence[int], generate: Generate) -> None:
        self._prompt = tuple(prompt_ids)
        self._generate = generate
        self._ids: list[int] = []
        self._mask: list[bool] = []
        self._log_probs: list[float] = []
        self._versions: list[int | None] = []
        """[R] version of the weights that generated each token; None: the policy did not."""
        self._kept: list[tuple[int, KeptSets | None]] = []
        """Tokens and their sets, of each turn and observation."""
        self._routed: list[ExpertIds | None] = []
        """The experts of the tokens so far, after each turn."""
        self._newest = 0
        """Version of the weights that the last turn ended with."""

    @property
    def left(self) -> int:
        """Tokens left for the trajectory."""
        return self._generate.response_length - len(self._ids)

    async def turn(self, max_tokens: int = 0, *, stop: Sequence[str] = ()) -> Generation:
        """Generate one turn of at most `max_tokens` tokens (0: what is left, which must be at least
        1), or up to a string of `stop` or of the run's `rollout.stop`.

        A turn that an update of the weights aborts is continued with the new weights. The result is
        the whole turn, with the oldest of its weight versions.
        """
        budget = min(max_tokens or self.left, self.left)
        assert budget > 0, "a turn needs room for a token"
        context = (*self._prompt, *self._ids)
        parts, finish = await generate_turn(
            lambda made, left: self._ask((*context, *made), left, stop), budget, stop_check(self._generate, stop)
        )
        turn = Generation(
            response_ids=tuple(token for part in parts for token in part.response_ids),
            log_probs=tuple(value for part in parts for value in part.log_probs),
            finish_reason=finish,
            weight_version=min(part.weight_version for part in parts if part.response_ids or part is parts[-1]),
            kept=KeptSets.joined((len(part.response_ids), part.kept) for part in parts),
            routed=join_routed(part.routed for part in parts),
        )
        self._routed.append(turn.routed)
        versions = [part.weight_version for part in parts for _ in part.response_ids]
        self._add(turn.response_ids, turn.log_probs, versions, turn.kept)
        self._newest = parts[-1].weight_version
        return turn

    def _ask(self, context: Sequence[int], left: int, stop: Sequence[str]) -> Awaitable[Generation]:
        return self._generate(context, left, stop=stop) if stop else self._generate(context, left)

    def observe(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy reads, and is not trained on."""
        self._add(ids, [0.0] * len(ids), [None] * len(ids))

    def _add(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        versions: Sequence[int | None],
        kept: KeptSets | None = None,
    ) -> None:
        self._ids += ids
        self._log_probs += log_probs
        self._versions += versions
        self._mask += [version is not None for version in versions]
        self._kept.append((len(ids), kept))

    def trajectory(self, stats: RolloutStats | None = None) -> Trajectory:
        """The trajectory, after at least one turn."""
        runs = version_runs(self._versions)
        return Trajectory(
            response_ids=tuple(self._ids),
            response_mask=tuple(self._mask),
            log_probs=tuple(self._log_probs),
            weight_version=min((version for version, _ in runs), default=self._newest),
            versions=runs,
            stats=stats,
            kept=KeptSets.joined(self._kept),
            routed=join_routed(self._routed),
        )
