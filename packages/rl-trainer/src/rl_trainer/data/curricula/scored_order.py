"""The order of prompts of a curriculum that sees scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np

from rl_trainer.data.curricula.prompt_scores import FloatArray, PromptScores, ScoreState
from rl_trainer.data.curricula.scored import ScoredCurriculum
from rl_trainer.data.prompt_order import PromptOrder


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rows: dict[int, int]
    scores: ScoreState


class ScoredOrder(PromptOrder):
    """Draws each prompt by the scores that are known then.

    Rows are drawn without repetition among those whose training is not over, as long as there are
    others. A place of the order keeps its row until it was trained, so a step that is sampled again
    has the same prompts. Which scores are known when a step draws follows from the run: with
    async_rl.max_staleness=0, and in a deterministic run, the draws are those of a resumed run.

    Args:
        sources: [rows] data source of each row of the data set.
        batch_size: prompts of a step.
        seed: of the draws, with the place in the order.
        curriculum: weighs the rows.
        target: see PromptScores.
    """

    def __init__(
        self, sources: Sequence[str], batch_size: int, seed: int, curriculum: ScoredCurriculum, target: float
    ) -> None:
        super().__init__(len(sources), batch_size, seed)
        self._scored = curriculum
        self._scores = PromptScores(sources, target)
        self._rows: dict[int, int] = {}
        """Row of each place that was drawn and not trained."""

    def take(self, start: int, count: int) -> list[int]:
        """[count] row numbers from position `start`; those that are not drawn yet are drawn now."""
        places = range(start, start + count)
        if fresh := [place for place in places if place not in self._rows]:
            rng = np.random.default_rng((self._seed, fresh[0]))
            weights = self._scored.weights(self._scores)
            drawn = draw_rows(weights, len(fresh), self._rows.values(), rng)
            self._rows |= zip(fresh, drawn, strict=True)
        return [self._rows[place] for place in places]

    def trained(self, places: Collection[int]) -> None:
        for place in places:
            self._rows.pop(place, None)

    def observe(self, step: int, scores: Mapping[int, tuple[float, float]]) -> dict[str, float]:
        """Note the scores of a step.

        Returns:
            Metrics, curriculum/*.
        """
        before = self._scores.mean[list(scores)]
        again = ~np.isnan(before)
        self._scores.add(step, scores)
        metrics = {"curriculum/seen_prompts": float(self._scores.seen.sum())}
        if scores:
            metrics["curriculum/repeated_ratio"] = float(again.mean())
        if again.any():
            change = self._scores.mean[list(scores)] - before
            metrics["curriculum/score_change"] = float(change[again].mean())
        for source, known in self._scores.by_source().items():
            metrics[f"curriculum/{source}/score_mean"] = known.mean
            metrics[f"curriculum/{source}/score_variance"] = known.variance
            metrics[f"curriculum/{source}/age"] = float(known.age)
        return metrics

    @property
    def state(self) -> bytes:
        return msgspec.msgpack.encode(_State(self._rows, self._scores.state()))

    def restore(self, state: bytes) -> None:
        saved = msgspec.msgpack.decode(state, type=_State)
        self._rows = dict(saved.rows)
        self._scores.restore(saved.scores)


def draw_rows(weights: FloatArray, count: int, busy: Collection[int], rng: np.random.Generator) -> list[int]:
    """[count] rows, one after the other in proportion to their weights.

    A row is drawn again, and a busy one at all, only where no other has a weight above 0.

    The rows of the largest log(weight) + Gumbel noise are such a sample (Efraimidis and Spirakis
    2006).
    """
    drawn: list[int] = []
    closed = set(busy)
    while len(drawn) < count:
        free = weights > 0
        free[list(closed)] = False
        if not free.any():
            closed = set()
            continue
        rows = np.flatnonzero(free)
        keys = np.log(weights[rows]) + rng.gumbel(size=rows.size)
        more = rows[np.argsort(-keys, kind="stable")[: count - len(drawn)]].tolist()
        drawn += more
        closed.update(more)
    return drawn
