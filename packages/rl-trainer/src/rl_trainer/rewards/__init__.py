"""Rewards: reward functions, the processes and services that run them, and validation metrics."""

from rl_trainer.rewards.function_pool import ScorerPool
from rl_trainer.rewards.functions import InlineScorer
from rl_trainer.rewards.loading import check_reward, load_reward
from rl_trainer.rewards.scorer import Failure, Outcome, Sample, Scored, Scorer
from rl_trainer.rewards.weighted_sum import CombinedScorer, Term, combine, functions_of, parse_terms, unscored

__all__ = [
    "CombinedScorer",
    "Failure",
    "InlineScorer",
    "Outcome",
    "Sample",
    "Scored",
    "Scorer",
    "ScorerPool",
    "Term",
    "check_reward",
    "combine",
    "functions_of",
    "load_reward",
    "parse_terms",
    "unscored",
]
