"""Samplers of TransferQueue 0.1.11, which choose among `ready_indexes`.

They run in the process that asks for rows, not in the controller; the plane hands no row out twice.
"""

from rl_transferqueue.compat.sampler.base import BaseSampler
from rl_transferqueue.compat.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from rl_transferqueue.compat.sampler.rank_aware_sampler import RankAwareSampler
from rl_transferqueue.compat.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler
from rl_transferqueue.compat.sampler.sequential_sampler import SequentialSampler

__all__ = ["BaseSampler", "GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler", "SequentialSampler"]
