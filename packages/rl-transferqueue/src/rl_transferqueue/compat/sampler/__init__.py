"""The samplers of TransferQueue 0.1.11: classes that see row numbers (`ready_indexes`) and say which to hand out and which to mark consumed.

They run in the process that asks, not in the controller; the plane makes sure that no row goes to two. `rl_transferqueue.samplers` is the
native way: groups by tag, not by consecutive numbers.
"""

from rl_transferqueue.compat.sampler.base import BaseSampler
from rl_transferqueue.compat.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from rl_transferqueue.compat.sampler.rank_aware_sampler import RankAwareSampler
from rl_transferqueue.compat.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from rl_transferqueue.compat.sampler.sequential_sampler import SequentialSampler

__all__ = ["BaseSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler", "SequentialSampler"]
