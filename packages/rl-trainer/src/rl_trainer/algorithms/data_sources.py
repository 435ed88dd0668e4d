"""The settings of each row of a batch, some by data source (`AlgorithmConfig.by_source`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rl_protocol import BatchData
from rl_trainer.algorithms.arrays import BoolArray, FloatArray, IntArray
from rl_trainer.algorithms.loss_parts import PartCoefs
from rl_trainer.algorithms.metrics import stats
from rl_trainer.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of a batch, by data source.

    Attributes:
        algorithm: settings of the run.
        sources: [N] the data source of each row; None: no settings depend on it.
        lengths: [N] tokens of each row.
    """

    algorithm: AlgorithmConfig
    sources: Sequence[str] | None
    lengths: IntArray

    @classmethod
    def of(cls, algorithm: AlgorithmConfig, data: BatchData) -> SourceRows:
        """Those of a batch, which has the column data_source where the settings depend on it."""
        sources = data.objects("data_source").values() if algorithm.by_source else None
        return cls(algorithm, sources, data.ragged("responses").lengths)

    @property
    def present(self) -> list[str]:
        """The data sources of the rows, each once."""
        return sorted(set(self.sources or ()))

    def coefs(self) -> PartCoefs:
        """The coefficients of the parts of the loss for each token."""
        return PartCoefs(
            rl=self._coef(lambda source: self.algorithm.for_source(source).rl_coef),
            sft=self._coef(lambda source: self.algorithm.for_source(source).sft_coef),
            echo=self._coef(lambda source: self.algorithm.for_source(source).echo_coef),
            ref_kl=self._coef(self.algorithm.ref_kl_coef),
        )

    def estimates(self) -> Iterator[tuple[AlgorithmConfig, BoolArray | None]]:
        """(settings, tokens [T]) of the rows whose advantages are estimated together: those whose
        settings of the estimator are equal; None: all. Rows without a policy loss have none.
        """
        if self.sources is None:
            if self.algorithm.rl_coef:
                yield self.algorithm, None
            return
        groups: dict[tuple[object, ...], tuple[AlgorithmConfig, list[str]]] = {}
        for source in self.present:
            one = self.algorithm.for_source(source)
            if one.rl_coef:
                same = one.adv_estimator, one.norm_adv_by_std_in_grpo, one.gamma, one.lam
                groups.setdefault(same, (one, []))[1].append(source)
        for one, sources in groups.values():
            yield one, self.tokens(sources)

    def tokens(self, sources: Sequence[str]) -> BoolArray:
        """bool [T], true for the tokens of rows of these sources."""
        return np.repeat(np.array([one in sources for one in self.sources or ()], np.bool_), self.lengths)

    def metrics(
        self, scored: IntArray, scores: FloatArray, advantages: FloatArray, mask: BoolArray
    ) -> dict[str, float]:
        """What is reported of each source: the scores [N] of generated responses, of the rows
        `scored`, the advantages [T] of generated tokens, those in `mask`, and their number.
        """
        found: dict[str, float] = {}
        for source in self.present:
            own, name = self.tokens([source]) & mask, f"source/{source}"
            rows = [row for row in scored.tolist() if self.sources and self.sources[row] == source]
            found |= stats(f"{name}/score", scores[rows]) | stats(f"{name}/advantages", advantages, own)
            found[f"{name}/tokens"] = float(own.sum())
        return found

    def _coef(self, of: Callable[[str], float]) -> npt.NDArray[np.float32] | np.float32:
        if self.sources is None:
            return np.float32(of(""))
        values = {source: of(source) for source in self.present}
        return np.repeat(np.array([values[source] for source in self.sources], np.float32), self.lengths)
