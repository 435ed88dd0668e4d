// The recorded trajectories: filtered, sorted, one line each.

import { diverging } from "./color";
import type { Run, Trajectory } from "./data";
import { brief, count, h, num } from "./dom";
import { change, link, route } from "./route";
import { virtualList } from "./virtual";

const SORTS: Record<string, [label: string, value: (row: Trajectory) => number]> = {
  order: ["order", (row) => row.index], reward: ["lowest reward", (row) => row.score], best: ["highest reward", (row) => -row.score],
  gap: ["largest gap", (row) => -row.gap], advantage: ["largest advantage", (row) => -Math.abs(row.advantage)],
  length: ["longest", (row) => -row.length], age: ["oldest weights", (row) => row.versions[0]?.[0] ?? 0],
};
let order: Trajectory[] = [];

/** The trajectory before (-1) or after (1) another in the list that was shown last. */
export function neighbour(run: Run, row: Trajectory, by: number): Trajectory | undefined {
  const rows = order.length ? order : run.trajectories;
  return rows[rows.indexOf(row) + by];
}

/** How much of the weight of signs a number has, for its background. */
export function signed(value: number, text = num(value)): HTMLElement {
  const cell = h("span", { class: "signed" }, text);
  if (Number.isFinite(value)) cell.style.background = diverging(value / 2.5);
  return cell;
}

export function sampleLink(runs: Run[], run: Run, row: Trajectory): string {
  return link("sample", [row.step, row.key], { run: runs.indexOf(run) || null, by: route().query.get("by") });
}

export function samples(runs: Run[]): Node {
  const { query } = route();
  const which = Number(query.get("run") ?? 0), run = runs[which] ?? runs[0]!;
  const [step, why, q, sort] = ["step", "why", "q", "sort"].map((name) => query.get(name) ?? "");
  const words = (q ?? "").toLowerCase();
  const rows = (step ? run.byStep.get(Number(step)) ?? [] : run.trajectories).filter((row) =>
    (!why || row.why === why || (why === "wrong" && row.reward["acc"] === 0) || (why === "right" && row.reward["acc"] === 1)) &&
    (!words || row.response.toLowerCase().includes(words) || row.prompt.toLowerCase().includes(words) || row.key.includes(words)));
  const value = (SORTS[sort || "order"] ?? SORTS["order"]!)[1];
  if (sort && sort !== "order") rows.sort((a, b) => (Number.isNaN(value(a)) ? 1 : 0) - (Number.isNaN(value(b)) ? 1 : 0) || value(a) - value(b));
  order = rows;
  const steps = [...run.byStep.keys()];
  const option = (value: string | number, label: string, now: string): HTMLElement => h("option", { value, selected: String(value) === now }, label);
  const pick = (name: string, label: string, options: [string | number, string][], now: string): Node =>
    h("select", { "aria-label": label, change: (event: Event) => change({ [name]: (event.target as HTMLSelectElement).value || null }) },
      ...options.map(([value, text]) => option(value, text, now)));
  const reasons = ["worst", "best", "random", "stale", "gap", "failed"].filter((name) => run.trajectories.some((row) => row.why === name));
  const newest = steps.length - 1, at = step ? steps.indexOf(Number(step)) : -1;
  const go = (next: number): void => { if (steps[next] !== undefined) change({ step: steps[next]! }); };
  return h("section", {},
    h("div", { class: "bar" },
      runs.length > 1 ? pick("run", "run", runs.map((one, i) => [i, `${"AB"[i]} \u00b7 ${one.name}`]), String(which)) : null,
      h("button", { id: "before", "aria-label": "previous step", click: () => go(at < 0 ? newest : at - 1) }, "\u2039"),
      pick("step", "step", [["", "all steps"], ...steps.map((one): [number, string] => [one, `step ${one}`])], step!),
      h("button", { id: "after", "aria-label": "next step", click: () => go(at < 0 ? 0 : at + 1) }, "\u203a"),
      pick("why", "filter", [["", "all"], ["right", "right"], ["wrong", "wrong"], ...reasons.map((one): [string, string] => [one, `chosen: ${one}`])], why!),
      pick("sort", "order", Object.entries(SORTS).map(([name, [label]]): [string, string] => [name, label]), sort || "order"),
      h("input", { type: "search", class: "search", id: "search", placeholder: "search texts ( / )", "aria-label": "search texts", value: q,
        change: (event: Event) => change({ q: (event.target as HTMLInputElement).value }) }),
      h("span", { class: "count" }, `${rows.length.toLocaleString("en")} trajectories`)),
    rows.length ? h("div", { class: "card flush" },
      h("div", { class: "row head" }, ...["step", "chosen", "prompt", "response", "reward", "adv", "gap", "tokens"].map((name, i) => h("span", { class: `c${i}` }, name))),
      virtualList(rows.length, 30, (i) => line(runs, run, rows[i]!), rows.findIndex((row) => row.key === query.get("key"))))
      : h("p", { class: "empty" }, run.trajectories.length ? "No trajectory fits these filters." : "The run has recorded no trajectories (trainer.sample_freq)."));
}

function line(runs: Run[], run: Run, row: Trajectory): HTMLElement {
  return h("a", { class: "row", href: sampleLink(runs, run, row) },
    h("span", { class: "c0" }, row.step), h("span", { class: "c1" }, h("span", { class: "why" }, row.why)),
    h("span", { class: "c2 text" }, brief(row.prompt, 120)), h("span", { class: "c3 text" }, brief(row.response, 160)),
    h("span", { class: "c4 n" }, row.failure ? "failed" : num(row.score)), h("span", { class: "c5 n" }, signed(row.advantage)),
    h("span", { class: "c6 n" }, num(row.gap)), h("span", { class: "c7 n" }, row.length));
}

/** All recorded trajectories of a prompt in a step. */
export function group(runs: Run[]): Node {
  const { parts, query } = route();
  const run = runs[Number(query.get("run") ?? 0)] ?? runs[0]!;
  const step = Number(parts[0]), rows = (run.byStep.get(step) ?? []).filter((row) => row.uid === parts[1]);
  if (!rows.length) return h("p", { class: "empty" }, "This prompt was not recorded in this step.");
  order = rows;
  const first = rows[0]!;
  const mean = rows.reduce((sum, row) => sum + (Number.isNaN(row.score) ? 0 : row.score), 0) / rows.length;
  return h("section", {}, crumbs(step, first.uid, runs.indexOf(run)),
    h("div", { class: "card" }, h("h3", {}, "Prompt", h("span", { class: "why" }, first.why)), h("pre", { class: "text" }, brief(first.prompt, 4000)),
      h("p", { class: "hint" }, `${rows.length} responses, mean reward ${num(mean)}`, first.truth ? ` \u00b7 ground truth: ${brief(first.truth, 200)}` : "")),
    h("div", { class: "group" }, ...rows.map((row) => {
      const card = h("a", { class: "answer", href: sampleLink(runs, run, row) },
        h("header", {}, h("b", {}, row.failure ? "failed" : num(row.score)), signed(row.advantage, `advantage ${num(row.advantage)}`)),
        h("pre", { class: "text" }, brief(row.response, 600)),
        h("footer", {}, count(row.length, "token"), row.finish && row.finish !== "stop" ? ` \u00b7 ${row.finish}` : "", ` \u00b7 ${row.key.slice(row.uid.length + 1)}`));
      return card;
    })));
}

export function crumbs(step: number, uid: string, run: number, key = ""): Node {
  const which = { run: run || null };
  return h("nav", { class: "crumbs", "aria-label": "place" }, h("a", { href: link("samples", [], { step, ...which }) }, `step ${step}`),
    h("span", {}, "\u203a"), h("a", { href: link("group", [step, uid], which) }, `prompt ${uid}`),
    ...(key ? [h("span", {}, "\u203a"), h("span", {}, `response ${key}`)] : []));
}
