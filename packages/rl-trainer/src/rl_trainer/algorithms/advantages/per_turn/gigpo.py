"""GiGPO: credit for each turn of an agent, by comparing turns that began in the same state."""

from __future__ import annotations

import numpy as np

from rl_protocol import ConfigError
from rl_trainer.algorithms.advantages.episodes import Episodes
from rl_trainer.algorithms.advantages.estimator import AdvantageInputs, Estimate
from rl_trainer.algorithms.advantages.group_stats import group_stats, stats_by
from rl_trainer.algorithms.arrays import BoolArray, IntArray, sum_by


def gigpo(inputs: AdvantageInputs) -> Estimate:
    """GiGPO (Feng et al. 2025, arXiv:2505.10978, equations 3 to 8).

    A token's advantage is that of its session plus `step_coef` times that of its turn. The first is
    `grpo`. The second compares the discounted return of the turn, sum_k gamma^k r_k over this and
    the session's later turns, with those of all turns of the prompt that began in the same state,
    also of the same session: (return - mean) / (std + 1e-6), without the division if not
    `norm_by_std`. A state that only one turn began in gives 0.

    The state is what the turn answers: the observation tokens since the previous turn, or none, for
    the first turn of a trajectory, which answers the prompt. Tokens without an observation between
    them belong to one turn.

    Raises:
        ConfigError: the tokens of the responses are missing.
    """
    e = inputs.episodes
    total = e.per_token(group_stats(e, inputs.session_scores()).normalized(by_std=inputs.norm_by_std))
    turn, states, turns = _turns(inputs)
    rewards = sum_by(turn, inputs.rewards(), states.size)
    returns = turns.discounted_sums(rewards, inputs.gamma)
    steps = stats_by(states, np.ones(states.size, np.bool_), returns).normalized(by_std=inputs.norm_by_std)
    per_token = inputs.scatter(total + inputs.step_coef * steps[turn])
    return per_token, per_token


def _turns(inputs: AdvantageInputs) -> tuple[IntArray, IntArray, Episodes]:
    """The K turns that have a token to train on, in the order of the episodes' tokens.

    Returns:
        [M] the turn of each token; [K] the state that each turn began in, as a number that is the
        same for equal states of equal prompts; the sessions, as episodes of turns.
    """
    e = inputs.episodes
    if inputs.responses is None or inputs.generated is None:
        raise ConfigError("AlgorithmConfig.adv_estimator=gigpo needs the tokens of the responses; got none.")
    generated, first_of_row = inputs.generated, np.zeros(inputs.mask.size, np.bool_)
    first_of_row[inputs.offsets[:-1][np.diff(inputs.offsets) > 0]] = True
    begins = generated & (first_of_row | ~np.append(False, generated[:-1]))
    place = (np.cumsum(begins) - 1)[e.tokens]  # which of all turns, in the order of the rows
    new = np.append(True, place[1:] != place[:-1])[: place.size]
    turn = np.cumsum(new) - 1
    session = np.repeat(np.arange(e.lengths.size), e.lengths)[new]
    states = _states(inputs, begins, place[new], e.group[session])
    offsets = np.searchsorted(session, np.arange(e.lengths.size + 1)).astype(np.int64)
    return turn, states, Episodes(tokens=np.arange(states.size), offsets=offsets, group=e.group, final_row=e.final_row)


def _states(inputs: AdvantageInputs, begins: BoolArray, place: IntArray, group: IntArray) -> IntArray:
    """[K] number of the state of the turns `place`, of prompts `group`, in order of appearance."""
    assert inputs.responses is not None
    assert inputs.generated is not None
    starts = np.flatnonzero(begins)
    # what is observed begins after the last generated token before the turn, or with the row
    before = np.maximum.accumulate(np.where(inputs.generated, np.arange(1, begins.size + 1), 0))
    row = inputs.offsets[np.searchsorted(inputs.offsets, starts, side="right") - 1]
    since = np.maximum(np.append(0, before)[starts], row)
    found: dict[tuple[int, bytes], int] = {}
    names = [
        (int(g), inputs.responses[since[p] : starts[p]].tobytes()) for p, g in zip(place.tolist(), group, strict=True)
    ]
    return np.array([found.setdefault(name, len(found)) for name in names], dtype=np.int64)
