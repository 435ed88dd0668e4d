"""The tokens that top-p and top-k kept when each token was sampled, in few bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORD = 32
"""Tokens in a word of a bitmap."""
BITMAP = -1
"""The word before a bitmap, which is no token id."""


def bitmap_words(vocabulary: int) -> int:
    """Words of a bitmap of that many tokens, with the one before it.

    >>> bitmap_words(32), bitmap_words(33)
    (2, 3)
    """
    return 1 - (-vocabulary // WORD)


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The kept tokens of R sampled tokens.

    Each has a number of words: none if all tokens were kept; the ids of the kept tokens, ascending;
    or, where that is fewer words, BITMAP and a bitmap of the vocabulary, with 32 tokens in a word,
    the lowest in its lowest bit. So a set takes at most one bit for each token of the vocabulary.

    >>> masks = np.array([[True] * 90, [False] * 89 + [True], [True, False] * 45])
    >>> kept = KeptSets.from_mask(masks)
    >>> kept.counts.tolist(), kept.words.tolist()
    ([0, 1, 4], [89, -1, 1431655765, 1431655765, 22369621])

    Attributes:
        counts: int32 [R], the words of each.
        words: int32 [sum of counts].
    """

    counts: npt.NDArray[np.int32]
    words: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def all_kept(cls, tokens: int) -> KeptSets:
        """The sets of that many sampled tokens, none of which excludes a token."""
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.int32))

    @classmethod
    def from_mask(cls, kept: npt.NDArray[np.bool_]) -> KeptSets:
        """The sets of `kept` [R, vocabulary], each of which has at least one token."""
        vocabulary = kept.shape[1]
        width, sizes = bitmap_words(vocabulary), kept.sum(1)
        mapped = (sizes > width) & (sizes < vocabulary)
        counts = np.where(mapped, width, np.where(sizes == vocabulary, 0, sizes)).astype(np.int32)
        words = np.zeros(counts.sum(), np.int32)
        in_bitmap = np.repeat(mapped, counts)
        bits = np.packbits(kept[mapped], axis=1, bitorder="little")
        padded = np.full((len(bits), 4 * width), 255, np.uint8)
        padded[:, 4:] = 0
        padded[:, 4 : 4 + bits.shape[1]] = bits
        words[in_bitmap] = padded.view("<i4").ravel()
        words[~in_bitmap] = np.nonzero(kept[~mapped & (sizes < vocabulary)])[1]
        return cls(counts, words)

    @classmethod
    def from_ids(cls, kept: Sequence[Sequence[int]], vocabulary: int) -> KeptSets:
        """The sets of R lists of different token ids, each of which has at least one."""
        parts = [np.array(sorted(ids), np.int32) for ids in kept]
        for place, ids in enumerate(parts):
            if len(ids) > bitmap_words(vocabulary):
                mask = np.zeros((1, vocabulary), np.bool_)
                mask[0, ids] = True
                parts[place] = cls.from_mask(mask).words
        words = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        return cls(np.array([len(part) for part in parts], np.int32), words)

    @staticmethod
    def joined(parts: Iterable[tuple[int, KeptSets | None]]) -> KeptSets | None:
        """The sets of (tokens, their sets) in order; where these are None, all tokens were kept.

        None: no part has sets.
        """
        listed = list(parts)
        if all(sets is None for _, sets in listed):
            return None
        known = [KeptSets.all_kept(tokens) if sets is None else sets for tokens, sets in listed]
        return KeptSets(np.concatenate([one.counts for one in known]), np.concatenate([one.words for one in known]))

    def head(self, tokens: int) -> KeptSets:
        """The sets of the first tokens."""
        counts = self.counts[:tokens]
        return KeptSets(counts, self.words[: counts.sum()])

    def contain(self, tokens: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool [R], whether each of these tokens is in its set."""
        ids = np.asarray(tokens, np.int64)
        starts = np.cumsum(self.counts, dtype=np.int64) - self.counts
        mapped = self.counts > 0
        mapped[mapped] = self.words[starts[mapped]] == BITMAP
        owner = np.repeat(np.arange(len(self)), self.counts)
        found = np.bincount(owner, self.words == ids[owner], len(self)) > 0
        word, bit = np.divmod(ids, WORD)
        found[mapped] = (self.words[(starts + 1 + word)[mapped]] >> bit[mapped]) & 1
        return found | (self.counts == 0)
