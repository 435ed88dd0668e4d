// The curves that are shown first, and how their metrics are called.

import type { Run } from "./data";

export interface Curve { title: string; metrics: [name: string | RegExp, label: string][]; what: string }

export const CURVES: Curve[] = [
  { title: "Accuracy", what: "share of correct answers", metrics: [[/^val-core\/.*\/acc\/mean@\d+$/, "validation"], ["critic/acc/mean", "training"]] },
  { title: "Reward", what: "score of a response", metrics: [["critic/score/mean", "mean"], ["critic/rewards/mean", "with penalties"]] },
  { title: "KL", what: "nats per token", metrics: [["actor/ref_kl", "to reference"], ["actor/reward_kl_penalty", "to reference, in the reward"], ["actor/kl_loss", "to reference, in the loss"], ["actor/ppo_kl", "within the step"]] },
  { title: "Entropy", what: "nats per token", metrics: [["actor/entropy", "policy"]] },
  { title: "Response length", what: "tokens", metrics: [["response_length/mean", "mean"], ["response_length/max", "longest"]] },
  { title: "Rollout/trainer gap", what: "difference of probabilities", metrics: [["training/rollout_probs_diff_mean", "mean"], ["training/rollout_probs_diff_max", "largest"]] },
  { title: "Gap by position", what: "mean difference of probabilities", metrics: [["training/rollout_probs_diff_quarter_1", "first quarter of the response"], ["training/rollout_probs_diff_quarter_2", "second"], ["training/rollout_probs_diff_quarter_3", "third"], ["training/rollout_probs_diff_quarter_4", "last"]] },
  { title: "Staleness", what: "versions", metrics: [["training/off_policy/trajectory_staleness/mean", "mean"], ["training/off_policy/trajectory_staleness_worst/max", "worst"]] },
  { title: "Throughput", what: "tokens per second", metrics: [["perf/throughput", "tokens/s"]] },
  { title: "Step time", what: "seconds", metrics: [["timing_s/step", "step"], ["timing_s/gen", "generation"], ["timing_s/update_actor", "update"]] },
  { title: "Gradient norm", what: "before clipping", metrics: [["actor/grad_norm", "policy"], ["critic/grad_norm", "critic"]] },
  { title: "Prompts without signal", what: "share with equal rewards", metrics: [["critic/score/equal_groups", "equal groups"]] },
  { title: "Cut-off responses", what: "share", metrics: [["response_length/truncated_ratio", "truncated"]] },
];

/** The names of a run's metrics that a pattern means. */
export function matching(run: Run, pattern: string | RegExp): string[] {
  return typeof pattern === "string" ? run.metricNames.filter((name) => name === pattern) : run.metricNames.filter((name) => pattern.test(name));
}

/** The first metric of a run that a curve has. */
export function leading(run: Run, title: string): string | undefined {
  const curve = CURVES.find((one) => one.title === title);
  return curve?.metrics.flatMap(([pattern]) => matching(run, pattern))[0];
}
