"""Leave the tokens that top-p and top-k excluded out of a distribution of logits.

A policy is then compared with the distribution that a response was sampled from (DeepSeek-V3.2,
arXiv:2512.02556, section 3.1). Needs the extra `[torch]`.
"""

from __future__ import annotations

import numpy as np
import torch

from rl_protocol.batch.batch_data import BatchData
from rl_protocol.batch.kept_sets import BITMAP, WORD, KeptSets
from rl_protocol.errors import BatchError
from rl_protocol.rl_columns import KEPT_COLUMNS

EXCLUDED = -1e30
"""Logit of an excluded token. Its probability is 0, and so is that times its log-prob, which it
would not be with an infinite one."""


class KeptTokens:
    """The tokens from which each of T response tokens was sampled.

    Args:
        sets: of the T tokens.
        device: of the logits.
    """

    def __init__(self, sets: KeptSets, device: torch.device) -> None:
        self._ends = np.concatenate([[0], np.cumsum(sets.counts, dtype=np.int64)])
        self._counts = torch.tensor(sets.counts, dtype=torch.int64, device=device)
        self._words = torch.tensor(sets.words, dtype=torch.int32, device=device)

    @classmethod
    def of(cls, batch: BatchData, device: torch.device) -> KeptTokens | None:
        """The sets in KEPT_COLUMNS of a batch; None: it has none."""
        if not all(name in batch for name in KEPT_COLUMNS):
            return None
        return cls(KeptSets(*(batch.ragged(name).values for name in KEPT_COLUMNS)), device)

    def restricted(self, scores: torch.Tensor) -> torch.Tensor:
        """The logits [T, vocabulary], in which those of excluded tokens are EXCLUDED.

        Raises:
            BatchError: see `excluded`.
        """
        return scores.masked_fill(self.excluded(slice(0, len(scores)), scores.shape[-1]), EXCLUDED)

    def excluded(self, rows: slice, vocabulary: int, block: slice | None = None) -> torch.Tensor:
        """bool [rows, vocabulary], true for the excluded tokens of these response tokens.

        Args:
            rows: which of the T tokens.
            vocabulary: its size.
            block: return these columns alone.

        Raises:
            BatchError: a set has a token beyond the vocabulary.
        """
        start, stop = (0, vocabulary) if block is None else (block.start, block.stop)
        first, last = self._ends[rows.start], self._ends[rows.stop]
        counts, words = self._counts[rows], self._words[first:last]
        out = (counts > 0)[:, None].repeat(1, stop - start)
        if not len(words):
            return out
        starts = counts.cumsum(0) - counts
        mapped = (counts > 0) & (words[starts.clamp(max=len(words) - 1)] == BITMAP)
        owner = torch.repeat_interleave(counts)
        listed = ~mapped[owner]
        ids = words[listed].long()
        if len(ids) and int(ids.max()) >= vocabulary:
            raise BatchError(
                f"The column kept_words has token {int(ids.max())}, and the model has {vocabulary}: the rollout engine has another vocabulary."
            )
        inside = (ids >= start) & (ids < stop)
        out[owner[listed][inside], ids[inside] - start] = False
        if bool(mapped.any()):
            out[mapped] = _unmapped(words[~listed], int(mapped.sum()), start, stop)
        return out


def _unmapped(words: torch.Tensor, rows: int, start: int, stop: int) -> torch.Tensor:
    """bool [rows, stop - start], true for the tokens from `start` to `stop` that are not in these
    bitmaps of one size."""
    first = start // WORD
    some = words.view(rows, -1, 1)[:, 1 + first : 1 + -(-stop // WORD)]
    bits = some >> torch.arange(WORD, dtype=torch.int32, device=words.device)
    missing = ((bits & 1) == 0).flatten(1)[:, start - first * WORD : stop - first * WORD]
    return torch.nn.functional.pad(missing, (0, stop - start - missing.shape[1]), value=True)
