// Two runs side by side: by metric, by prompt and by setting.

import type { Run } from "./data";
import { brief, h, num } from "./dom";
import { CURVES, matching } from "./metrics";
import { link } from "./route";
import { signed } from "./samples";

export function compare(runs: Run[]): Node {
  const [a, b] = runs;
  if (!a || !b) return h("p", { class: "empty" }, "Give two runs to compare them: rl report RUN RUN2");
  return h("section", {}, h("div", { class: "card" }, h("h3", {}, "Metrics at the last step"), metrics(a, b)),
    h("div", { class: "card" }, h("h3", {}, "Prompts that both runs recorded"), prompts(a, b)),
    h("div", { class: "card" }, h("h3", {}, "Settings that differ"), settings(a, b)));
}

function metrics(a: Run, b: Run): Node {
  const names = [...new Set(CURVES.flatMap((curve) => curve.metrics.flatMap(([pattern]) => matching(a, pattern))))];
  return h("div", { class: "scroll" }, h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, ...["metric", `A \u00b7 ${a.name}`, `B \u00b7 ${b.name}`, "B \u2212 A"].map((text, i) => h("th", { class: i ? "n" : "" }, text)))),
    h("tbody", {}, ...names.map((name) => h("tr", {}, h("td", {}, h("a", { href: link("curves", [], { q: name }) }, name)), h("td", { class: "n" }, num(a.last(name))),
      h("td", { class: "n" }, num(b.last(name))), h("td", { class: "n" }, num(b.last(name) - a.last(name))))))));
}

function prompts(a: Run, b: Run): Node {
  const mean = (run: Run): Map<string, { score: number; link: string }> => {
    const sums = new Map<string, { sum: number; count: number; link: string }>();
    for (const row of run.trajectories) {
      if (Number.isNaN(row.score)) continue;
      const old = sums.get(row.prompt) ?? { sum: 0, count: 0, link: "" };
      sums.set(row.prompt, { sum: old.sum + row.score, count: old.count + 1, link: link("group", [row.step, row.uid], { run: run === a ? null : 1 }) });
    }
    return new Map([...sums].map(([prompt, { sum, count, link: to }]) => [prompt, { score: sum / count, link: to }]));
  };
  const [left, right] = [mean(a), mean(b)];
  const both = [...left.keys()].filter((prompt) => right.has(prompt))
    .sort((x, y) => Math.abs(right.get(y)!.score - left.get(y)!.score) - Math.abs(right.get(x)!.score - left.get(x)!.score));
  if (!both.length) return h("p", { class: "hint" }, "There are none.");
  return h("div", { class: "scroll" }, h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, ...["prompt", "A", "B", "B \u2212 A"].map((text, i) => h("th", { class: i ? "n" : "" }, text)))),
    h("tbody", {}, ...both.slice(0, 100).map((prompt) => {
      const [x, y] = [left.get(prompt)!, right.get(prompt)!];
      return h("tr", {}, h("td", { class: "text" }, brief(prompt, 90)), h("td", { class: "n" }, h("a", { href: x.link }, num(x.score))),
        h("td", { class: "n" }, h("a", { href: y.link }, num(y.score))), h("td", { class: "n" }, signed(y.score - x.score)));
    }))), h("p", { class: "hint" }, `mean reward of the recorded responses; ${both.length} prompts`));
}

/** The lines of a YAML file as `key.key: value`. */
export function flat(yaml: string): Map<string, string> {
  const found = new Map<string, string>(), stack: [number, string][] = [];
  for (const line of yaml.split("\n")) {
    const match = /^( *)([\w.-]+):(.*)$/.exec(line);
    if (!match) continue;
    const indent = match[1]!.length;
    while (stack.length && stack.at(-1)![0] >= indent) stack.pop();
    stack.push([indent, match[2]!]);
    if (match[3]!.trim()) found.set(stack.map(([, name]) => name).join("."), match[3]!.trim());
  }
  return found;
}

function settings(a: Run, b: Run): Node {
  const [left, right] = [flat(a.header.config), flat(b.header.config)];
  const names = [...new Set([...left.keys(), ...right.keys()])].filter((name) => left.get(name) !== right.get(name)).sort();
  if (!names.length) return h("p", { class: "hint" }, "None.");
  return h("table", { class: "plain" }, h("tbody", {}, ...names.map((name) => h("tr", {}, h("td", {}, name),
    h("td", { class: "text" }, brief(left.get(name) ?? "\u2013", 80)), h("td", { class: "text" }, brief(right.get(name) ?? "\u2013", 80))))));
}

export function config(runs: Run[]): Node {
  return h("section", {}, ...runs.map((run) => h("div", { class: "card" }, h("h3", {}, `Configuration of ${run.name}`), h("pre", { class: "text" }, run.header.config))));
}
