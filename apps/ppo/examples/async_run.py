"""Generate the next batch while training on this one, and read how old the trained responses were.

Arguments are settings, as on the command line: `trainer.output_dir=runs`.
"""

import sys

from rl_app_ppo import train

result = train(
    options=sys.argv[1:],
    async_rl={"max_staleness": 1},  # versions; 0 is the synchronous loop
    trainer={"total_training_steps": 4, "run_name": "async"},
    quiet=True,
)
AGE, STARVED = "training/off_policy/trajectory_staleness_worst/max", "idle/trainer/starved"
for step in result.history:
    if AGE in step:  # not the validation before training
        print(f"step {step['step']}: {step[AGE]:.0f} versions old, the trainer waited {step[STARVED]:.2f} s")
