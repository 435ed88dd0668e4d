"""Prompts: data sets from files, their encoding, and the order in which they are trained on.

Importing this package loads neither pyarrow nor jinja2.
"""

from rl_trainer.data.curricula.prompt_scores import PromptScores
from rl_trainer.data.curricula.scored import ScoredCurriculum
from rl_trainer.data.curricula.scored_order import ScoredOrder
from rl_trainer.data.curriculum import Curriculum, CurriculumKind, Mixture
from rl_trainer.data.prompt_order import PromptOrder
from rl_trainer.data.prompt_rows import PromptDataset, PromptRow

__all__ = [
    "Curriculum",
    "CurriculumKind",
    "Mixture",
    "PromptDataset",
    "PromptOrder",
    "PromptRow",
    "PromptScores",
    "ScoredCurriculum",
    "ScoredOrder",
]
