"""Rewards: how responses are scored, by whom, and what becomes of a function that fails."""

from rl_trainer.rewards.functions import CombinedScorer, InlineScorer, Term, combine, parse_terms
from rl_trainer.rewards.loading import check_reward, load_reward
from rl_trainer.rewards.outcomes import Failure, Outcome, Sample, Scored, Scorer
from rl_trainer.rewards.pool import ScorerPool

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
    "load_reward",
    "parse_terms",
]
