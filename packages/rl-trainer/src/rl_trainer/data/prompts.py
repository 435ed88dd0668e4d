"""A prompt, and data sets of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """One row of a data set."""

    prompt_ids: tuple[int, ...]
    """[P] token ids, P >= 1."""
    data_source: str
    ground_truth: str
    extra_info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further facts for the reward function: whatever JSON can say."""
    images: tuple[str, ...] = ()
    """Paths of its images, in the order of the prompt, where `prompt_ids` holds the model's image token for every piece of them."""


class PromptDataset(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> PromptRow: ...
