"""Read a run from Python, also while it goes on: python read_a_run.py outputs/<run>"""

import sys
from collections import Counter
from pathlib import Path

from rl_app_ppo.outputs.metrics_file import read_metrics
from rl_app_ppo.outputs.run_record import read_run

run = Path(sys.argv[1])
for line in read_metrics(run / "metrics.jsonl"):
    print("step", line["step"], "score", line.get("critic/score/mean", "of the validation before training"))

record = read_run(run)
print("ended:", record.end.outcome if record.end else "not yet", "| alarms:", [alarm.name for alarm in record.alarms])

seconds = Counter()
for span in record.spans:
    seconds[span.worker, span.stage] += span.at - span.began
for (worker, stage), total in seconds.most_common(5):
    print(f"{worker} {stage}: {total:.2f} s")

best = max(record.trajectories, key=lambda row: row.reward.get("score", -1.0), default=None)
if best is not None:  # the record of the first second may still be in the memory of its process
    print("best:", best.prompt, "->", best.response, best.reward)
    for token, log_prob, advantage in zip(best.response_ids, best.rollout_log_probs, best.advantages, strict=True):
        print(repr(record.tokens[token]), f"log-prob {log_prob:.3f} advantage {advantage:.2f}")
