import { chart, setRange, type Line } from "./chart";
import type { Run } from "./data";
import { h } from "./dom";
import { CURVES, matching } from "./metrics";
import { change, link, route } from "./route";

export function openStep(step: number): void { location.hash = link("samples", [], { step }); }

function same(a: Line, b: Line): boolean {
  return a.points.length === b.points.length && a.points.every(([step, value], i) => b.points[i]![0] === step && b.points[i]![1] === value);
}

/** The lines of a curve for all runs; the second run is dashed, and a line equal to another is left out. */
export function linesOf(runs: Run[], metrics: [string | RegExp, string][]): Line[] {
  return runs.flatMap((run, r) => metrics.flatMap(([pattern, label], m) => matching(run, pattern).map((name) => ({
    label: runs.length > 1 ? `${label} (${"AB"[r]})` : label, points: run.points(name), color: m, dash: r > 0,
  })))).filter((line, i, all) => line.points.length && !all.slice(0, i).some((other) => other.dash === line.dash && same(other, line)));
}

export function curves(runs: Run[]): Node {
  const { query } = route();
  const search = query.get("q") ?? "";
  const names = [...new Set(runs.flatMap((run) => run.metricNames))].sort();
  const found = search ? names.filter((name) => name.toLowerCase().includes(search.toLowerCase())) : [];
  const input = h("input", { type: "search", class: "search", id: "search", placeholder: `search ${names.length} metrics ( / )`, value: search,
    "aria-label": "search metrics", change: (event: Event) => change({ q: (event.target as HTMLInputElement).value }) });
  const charts = search
    ? found.slice(0, 60).map((name) => chart(name, linesOf(runs, [[name, name.split("/").at(-1)!]]), openStep))
    : CURVES.map((curve) => ({ curve, lines: linesOf(runs, curve.metrics) })).filter(({ lines }) => lines.length)
      .map(({ curve, lines }) => chart(`${curve.title} \u00b7 ${curve.what}`, lines, openStep));
  return h("section", {},
    h("div", { class: "bar" }, input, h("button", { click: () => setRange(null) }, "reset zoom"),
      h("span", { class: "hint" }, "drag: zoom \u00b7 double click: reset \u00b7 click: the samples of a step")),
    search && !found.length ? h("p", { class: "empty" }, "No metric has this in its name.") : null,
    found.length > 60 ? h("p", { class: "hint" }, `the first 60 of ${found.length} metrics`) : null,
    h("div", { class: "charts" }, ...charts));
}
