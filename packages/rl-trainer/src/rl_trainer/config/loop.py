"""Options of the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from rl_protocol.support.options import Options, option


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Options):
    """Length, pace and seed of a run."""

    total_training_steps: int = option(30, "steps to train; -1: as many as the epochs have", ge=-1, resume="free")
    test_freq: int = option(5, "validate every so many steps; 0: only before and after", ge=0, resume="free")
    val_before_train: bool = option(True, "validate before the first step", resume="free", verl=".")
    sample_freq: int = option(
        1,
        "record a sample of the trajectories of every so many training steps, with all columns of their tokens, in record/ of the run folder "
        "for `rl report`; 0: none",
        ge=0,
        resume="free",
    )
    samples_per_step: int = option(
        32,
        "most trajectories of such a step to record: whole groups of a prompt, the worst, the best and random ones first",
        ge=1,
        resume="free",
    )
    save_freq: int = option(
        10,
        "save a checkpoint to resume from every so many steps, and after the last; 0: after the last alone",
        ge=0,
        resume="free",
    )
    keep_batches: int = option(
        0,
        "keep the batches of so many of the newest steps in batches/ of the run folder, with all columns and a digest of the weights after the "
        "step, for `rl replay`; 0: none; -1: of all steps",
        ge=-1,
        resume="free",
    )
    seed: int = option(0, "everything random is derived from it", ge=0, lt=2**31, verl="data.seed")
    deterministic: bool = option(
        False,
        "the trained weights do not depend on delays or on RolloutConfig.num_workers: each prompt is generated alone, and with "
        "AsyncConfig.max_staleness>0 a weight update waits until all admitted steps are sampled. Needs AlgorithmConfig.old_log_prob=recompute, "
        "which the app sets",
    )
    local_rows_slack: float = option(
        0.05,
        "with ranks of a model on several hosts, a rank may get so much more tokens than the busiest rank of an even split, in order to train on "
        "rows of its own host; 0: rows are split by tokens alone, as with LoopConfig.deterministic=true and LoopConfig.keep_batches",
        ge=0,
        le=1,
        resume="free",
    )
    stage_timeout_s: float = option(600.0, "longest one stage of a step may take, seconds", gt=0, resume="free")
