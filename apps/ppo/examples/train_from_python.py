"""Train from Python, twice in one process: the demo, then its model with a reward of your own.

Arguments are settings, as on the command line: `trainer.output_dir=runs`.
"""

import sys

from rl_app_ppo import train


def right_digits(data_source, solution_str, ground_truth, extra_info=None):
    """The share of the digits of the sum that the response has, at any place."""
    found = set(ground_truth) & set(solution_str)
    return {"score": len(found) / len(set(ground_truth)), "acc": float(len(found) == len(set(ground_truth)))}


settings = sys.argv[1:]
demo = train(options=settings, trainer={"total_training_steps": 2, "run_name": "demo"}, quiet=True)
rows = [
    {"prompt": f"{a}+{b}=", "data_source": "sums", "reward_model": {"ground_truth": str(a + b)}}
    for a in range(10, 30)
    for b in range(10, 30)
]
own = train(
    demo.model,
    rows,
    right_digits,
    options=settings,
    data={"train_batch_size": 16},
    actor={"ppo_mini_batch_size": 16, "optim": {"lr": 4e-4}},
    rollout={"n": 4, "response_length": 4},
    trainer={"total_training_steps": 2, "run_name": "own"},
    quiet=True,
)
for step in own.history[1:]:  # the first line is the validation before training
    print(step["step"], step["critic/score/mean"])
print(own.model)
