"""Records the completions of one session, and turns them into trajectories. Pure.

A completion whose context continues a trajectory extends it: the tokens in between are marked as
not generated. Any other context (reset, branched, or rewritten by the agent) begins a new
trajectory. So each generated token is in exactly one trajectory as generated.

The environment wrote what is between the completions of a trajectory, and what the session's first
context adds to the prompt. A later trajectory begins with a context that may have turns of the
policy in it, as other tokens than those that were generated: the environment wrote its last tokens,
`Completion.told`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import ne
from typing import Literal

from rl_protocol import KeptSets, RolloutError
from rl_protocol.batch.routed_experts import ExpertIds, join_routed
from rl_trainer.rollout.session_turns import Trajectory
from rl_trainer.rollout.token_versions import version_runs
from rl_trainer.rollout.trajectory_stats import RolloutStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of the policy."""

    context: tuple[int, ...]
    """[C] token ids of its context, which begin with the session's prompt."""
    response_ids: tuple[int, ...]
    """[R] generated token ids."""
    log_probs: tuple[float, ...]
    """[R] log-probs, nats."""
    versions: tuple[int, ...]
    """[R] version of the weights that generated each token."""
    kept: KeptSets | None = field(default=None, repr=False)
    """[R] the tokens from which each token was sampled, as `Generation.kept`."""
    routed: ExpertIds | None = field(default=None, repr=False, compare=False)
    """[tokens, layers, K] the experts of context and response, as `Generation.routed`."""
    told: int = 0
    """Last tokens of the context that are known to follow the policy's turns."""
    finish: Literal["stop", "length", "abort"] = "stop"
    """Why it ended."""


class Recorder:
    """The completions of one session, in the order they were finished.

    >>> recorder = Recorder((5, 6))
    >>> recorder.add(Completion(context=(5, 6), response_ids=(7,), log_probs=(-0.5,), versions=(3,)))
    >>> recorder.add(Completion(context=(5, 6, 7, 9), response_ids=(8,), log_probs=(-0.1,), versions=(4,)))
    >>> recorder.trajectories()
    [Trajectory(response_ids=(7, 9, 8), response_mask=(True, False, True), log_probs=(-0.5, 0.0,
    -0.1), weight_version=3, versions=((3, 2), (4, 1)), stats=RolloutStats(turns=2, tool_calls=0,
    tool_errors=0, finish='stop'))]

    Args:
        prompt_ids: [P] what every context begins with.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = tuple(prompt_ids)
        self._completions: list[Completion] = []
        self._texts: dict[str, tuple[int, ...]] = {}

    def check(self, context: Sequence[int]) -> None:
        """Refuse a context that can't be a row of this session.

        Raises:
            RolloutError: it does not begin with the prompt.
        """
        if tuple(context[: len(self.prompt_ids)]) != self.prompt_ids:
            raise RolloutError(
                f"Every context must begin with the {len(self.prompt_ids)} tokens of the session's prompt, {list(self.prompt_ids[:8])} ..; "
                f"got {list(context[:8])} ..."
            )

    def add(self, completion: Completion, text: str = "") -> None:
        """Record a completion.

        Args:
            completion: the completion.
            text: context and response as text, if the request was text.

        Raises:
            RolloutError: see `check`.
        """
        self.check(completion.context)
        self._completions.append(completion)
        if text:
            self._texts[text] = (*completion.context, *completion.response_ids)

    def ids(
        self, text: str, encode: Callable[[str], Sequence[int]], encode_rest: Callable[[str], Sequence[int]]
    ) -> tuple[int, ...]:
        """Token ids of a context that was sent as text.

        The part that repeats earlier text keeps the ids that were seen and generated then. Encoding
        it again could give other tokens, which the policy never generated.
        """
        known = max((said for said in self._texts if text.startswith(said)), key=len, default="")
        return (*self._texts[known], *encode_rest(text[len(known) :])) if known else tuple(encode(text))

    def trajectories(self) -> list[Trajectory]:
        """The trajectories; the last one is that of the newest completion. Empty if nothing was
        requested.
        """
        open_ends: list[_Growing] = []
        for completion in self._completions:
            fitting = [one for one in open_ends if completion.context[: len(one.ids)] == one.ids]
            one = max(fitting, key=lambda growing: len(growing.ids), default=_Growing(self.prompt_ids))
            one.go_on(completion, new=one.is_new and bool(open_ends))
            open_ends = [other for other in open_ends if other is not one] + [one]
        return [one.trajectory(len(self.prompt_ids)) for one in open_ends]


def common_end(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts have in common at their ends."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return next((count for count, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


class _Growing:
    """A trajectory under construction."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = ids
        self._made: list[bool] = []
        self._observed: list[bool] = []
        self._log_probs: list[float] = []
        self._versions: list[int | None] = []
        self._kept: list[tuple[int, KeptSets | None]] = []
        self._routed: list[ExpertIds | None] = []
        self._turns = 0
        self._finish = "stop"

    @property
    def is_new(self) -> bool:
        """Whether it has no completion yet."""
        return not self._turns

    def go_on(self, completion: Completion, *, new: bool) -> None:
        """Append a completion; `new`: it begins a trajectory of a session that has others."""
        given = len(completion.context) - len(self.ids)
        made = len(completion.response_ids)
        self.ids = (*completion.context, *completion.response_ids)
        told = min(completion.told, given) if new else given
        self._made += [False] * given + [True] * made
        self._observed += [False] * (given - told) + [True] * told + [False] * made
        self._log_probs += [0.0] * given + list(completion.log_probs)
        self._versions += [None] * given + list(completion.versions)
        self._kept += [(given, None), (made, completion.kept)]
        self._routed.append(completion.routed)
        self._turns += 1
        self._finish = "turn_length" if completion.finish == "length" else completion.finish

    def trajectory(self, prompt: int) -> Trajectory:
        runs = version_runs(self._versions)
        return Trajectory(
            response_ids=self.ids[prompt:],
            response_mask=tuple(self._made),
            observed=None if all(map(ne, self._made, self._observed)) else tuple(self._observed),
            log_probs=tuple(self._log_probs),
            weight_version=min((version for version, _ in runs), default=-1),
            versions=runs,
            stats=RolloutStats(turns=self._turns, finish=self._finish),
            kept=KeptSets.joined(self._kept),
            routed=join_routed(self._routed),
        )
