"""Prompts: what they are, in which order they are trained on, and how they are read from files. Importing it loads no library of tables."""

from rl_trainer.data.curricula import CurriculumKind
from rl_trainer.data.order import Curriculum, Mixture, PromptOrder
from rl_trainer.data.prompts import PromptDataset, PromptRow

__all__ = ["Curriculum", "CurriculumKind", "Mixture", "PromptDataset", "PromptOrder", "PromptRow"]
