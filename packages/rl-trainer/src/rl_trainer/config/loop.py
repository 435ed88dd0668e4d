"""Options of the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol.support.options import Options, option


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Options):
    """Length, pace and seed of a run."""

    total_training_steps: int = option(30, "steps to train; -1: as many as the epochs have", ge=-1, resume="free")
    test_freq: int = option(
        5, "steps from one validation to the next; 0: only before and after training", ge=0, resume="free"
    )
    val_before_train: bool = option(True, "validate before the first step", resume="free", verl=".")
    sample_freq: int = option(
        1,
        "steps from one recorded step to the next: a sample of its trajectories, with all columns of their tokens, goes to record/ of the run "
        "folder for `rl report`; 0: none",
        ge=0,
        resume="free",
    )
    samples_per_step: int = option(
        32,
        "most trajectories to record of a step: whole groups of a prompt, the worst, the best and random ones first",
        ge=1,
        resume="free",
    )
    save_freq: int = option(
        10,
        "steps from one checkpoint to the next; there is also one after the last step; 0: only that one",
        ge=0,
        resume="free",
    )
    keep_batches: int = option(
        0,
        "number of newest steps whose batches are kept in batches/ of the run folder, with all columns and a digest of the weights after the "
        "step, for `rl replay`; 0: none; -1: all steps",
        ge=-1,
        resume="free",
    )
    seed: int = option(0, "seed of everything random in the run", ge=0, lt=2**31, verl="data.seed")
    deterministic: bool = option(
        False,
        "the trained weights do not depend on delays or on RolloutConfig.num_workers: each prompt is generated alone, and with "
        "AsyncConfig.max_staleness>0 a weight update waits until all admitted steps are sampled. Needs AlgorithmConfig.old_log_prob=recompute, "
        "which the app sets",
    )
    local_rows_slack: float = option(
        0.05,
        "with ranks of a model on several hosts, fraction by which the tokens of a rank may exceed those of the busiest rank of an even split, in "
        "order to train on rows of its own host; 0: rows are split only by tokens, as with LoopConfig.deterministic=true and "
        "LoopConfig.keep_batches",
        ge=0,
        le=1,
        resume="free",
    )
    stage_timeout_s: float = option(600.0, "longest one stage of a step may take, seconds", gt=0, resume="free")
