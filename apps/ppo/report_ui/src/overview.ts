import { chart } from "./chart";
import { series, textOn } from "./color";
import { linesOf, openStep } from "./curves";
import type { Run } from "./data";
import { brief, bytes, h, num, seconds, visible, type Child } from "./dom";
import { CURVES, leading } from "./metrics";
import { link } from "./route";

export function overview(runs: Run[]): Node {
  return h("section", {},
    ...runs.flatMap((run) => [runs.length > 1 ? h("h2", {}, `${"AB"[runs.indexOf(run)]} \u00b7 ${run.name}`) : null, alarms(run), tiles(run)]),
    h("div", { class: "charts wide" }, ...["Accuracy", "Reward"].map((title) => {
      const curve = CURVES.find((one) => one.title === title)!;
      const lines = linesOf(runs, curve.metrics);
      return lines.length ? chart(`${title} \u00b7 ${curve.what}`, lines, openStep, 220) : null;
    }).filter((node): node is HTMLElement => node !== null)),
    ...runs.flatMap((run) => [stages(run), moved(run), notable(run)]));
}

function alarms(run: Run): Node {
  const { outcome } = run.header;
  const cards: Child[] = [];
  if (outcome.state === "failed") cards.push(h("li", { class: "alarm bad" }, h("b", {}, "The run failed"), h("p", {}, visible(outcome.text))));
  if (outcome.state === "unfinished") cards.push(h("li", { class: "alarm" }, h("b", {}, "The run has not ended"),
    h("p", {}, "The run continues, or it was killed; the report shows what was written until now.")));
  if (outcome.state === "interrupted") cards.push(h("li", { class: "alarm" }, h("b", {}, "The run was interrupted")));
  for (const [, name, text] of run.header.alarms as [number, string, string][]) {
    const step = /^step (\d+)/.exec(text)?.[1];
    cards.push(h("li", { class: "alarm" }, h("b", {}, name), step ? h("a", { href: link("samples", [], { step }) }, `step ${step}`) : null,
      h("p", {}, visible(text.replace(/^step \d+: /, "")))));
  }
  return cards.length ? h("ul", { class: "alarms", "aria-label": "alarms" }, ...cards)
    : h("p", { class: "calm" }, "No alarms in this run.");
}

function tiles(run: Run): Node {
  const tile = (label: string, value: string, note = ""): Node =>
    h("div", { class: "tile" }, h("span", {}, label), h("b", {}, value), h("small", {}, note));
  const change = (label: string, title: string): Node | null => {
    const name = leading(run, title);
    return name ? tile(label, num(run.last(name)), `from ${num(run.first(name))}`) : null;
  };
  const last = run.steps.at(-1) ?? 0;
  const wall = (run.ends.at(-1)?.at ?? run.header.began) - run.header.began;
  return h("div", { class: "tiles" },
    change("accuracy", "Accuracy"), change("reward", "Reward"), change("response length", "Response length"), change("entropy", "Entropy"),
    change("KL", "KL"), change("gap", "Rollout/trainer gap"),
    tile("tokens/s", num(run.last("perf/throughput")), `${seconds(run.last("timing_s/step") || 0)} per step`),
    tile("steps", String(last), run.header.total > 0 ? `of ${run.header.total} in ${seconds(wall)}` : seconds(wall)));
}

interface Part { name: string; mean: number }

/** The mean over the steps of a run of each metric with this prefix, largest first; those of 0 are left out. */
function means(run: Run, prefix: string, skip: Set<string> = new Set()): Part[] {
  return run.metricNames.filter((name) => name.startsWith(prefix) && !skip.has(name)).map((name) => {
    const points = run.points(name).filter(([step]) => step > 0);
    return { name: name.slice(prefix.length), mean: points.reduce((sum, [, v]) => sum + v, 0) / Math.max(1, run.steps.length - 1) };
  }).filter(({ mean }) => mean > 0).sort((a, b) => b.mean - a.mean);
}

/** Parts of a step as one bar with a legend; nothing without parts. */
function bar(title: string, parts: Part[], shown: (value: number) => string, more: Node | null = null): Node {
  const sum = parts.reduce((total, { mean }) => total + mean, 0);
  if (!sum) return h("span");
  const boxes = parts.map(({ name, mean }, i) => {
    const box = h("div", { title: `${name}: ${shown(mean)}` }, mean / sum > 0.08 ? name : "");
    box.style.flex = `${mean / sum} 0 0`;
    box.style.background = series(i);
    box.style.color = textOn(series(i));
    return box;
  });
  return h("div", { class: "card" }, h("h3", {}, title, more),
    h("div", { class: "stack", role: "img", "aria-label": parts.map(({ name, mean }) => `${name} ${num((100 * mean) / sum)} percent`).join(", ") }, ...boxes),
    h("div", { class: "legend" }, ...parts.slice(0, 8).map(({ name, mean }, i) => {
      const dot = h("i", { class: "dot" });
      dot.style.background = series(i);
      return h("span", {}, dot, `${name} `, h("b", {}, `${Math.round((100 * mean) / sum)} %`), ` ${shown(mean)}`);
    })));
}

function stages(run: Run): Node {
  const skip = new Set(["timing_s/step", "timing_s/testing", "timing_s/save_checkpoint"]);
  return bar("Time per stage of a step", means(run, "timing_s/", skip), seconds, h("a", { href: link("timeline") }, "timeline"));
}

/** The bytes of rows that a step puts into the data plane and gets from it, by the link they take. */
function moved(run: Run): Node {
  const links = means(run, "transfer_queue/bytes_").map(({ name, mean }) => ({ name: name.replace("_", " "), mean }));
  return bar("Data moved in a step, by link", links, bytes, h("a", { href: link("curves", [], { q: "transfer_queue/bytes" }) }, "curves"));
}

function notable(run: Run): Node {
  const last = [...run.byStep.keys()].at(-1);
  if (last === undefined) return h("p", { class: "empty" }, "The run has recorded no trajectories (trainer.sample_freq).");
  const seen = new Set<string>();
  const rows = run.byStep.get(last)!.filter((row) => !seen.has(row.why) && Boolean(seen.add(row.why)));
  return h("div", { class: "card" }, h("h3", {}, `Step ${last}`, h("a", { href: link("samples", [], { step: last }) }, "all samples")),
    h("table", { class: "plain" }, h("tbody", {}, ...rows.map((row) => h("tr", {},
      h("td", {}, h("span", { class: "why" }, row.why)),
      h("td", {}, h("a", { href: link("group", [row.step, row.uid]) }, brief(row.prompt, 70))),
      h("td", { class: "text" }, brief(row.response, 70)), h("td", { class: "n" }, num(row.score)))))),
    h("p", { class: "hint" }, `recorded: ${run.header.rule}`,
      run.header.every > 1 ? `. Shown: the steps that are multiples of ${run.header.every}, and the last one.` : ""));
}
