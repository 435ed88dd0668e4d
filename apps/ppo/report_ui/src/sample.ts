// One trajectory as a strip of tokens, coloured by one of its columns.

import { diverging, sequential, series } from "./color";
import type { Run, Trajectory } from "./data";
import { brief, h, num, visible } from "./dom";
import { change, link, route } from "./route";
import { crumbs, neighbour, sampleLink, signed } from "./samples";

const CHUNK = 3000;
interface Shade { label: string; values: ArrayLike<number> | null; color: (value: number, most: number) => string; what: string }

function shades(run: Run, row: Trajectory): Record<string, Shade> {
  const logProb = (value: number): string => sequential(-value / 5);
  const either = (value: number, most: number): string => diverging(most ? value / most : 0);
  return {
    advantage: { label: "advantage", values: run.values("advantages", row), color: either, what: "orange: below the group, blue: above" },
    log_prob: { label: "log-prob", values: run.values("rollout_log_probs", row), color: logProb, what: "darker: less likely when it was sampled" },
    gap: { label: "gap", values: run.gaps(row), color: (value, most) => diverging(value / Math.max(most, 0.05)), what: "trainer's log-prob minus rollout's; orange: rollout's was higher" },
    kl: { label: "to reference", values: difference(run.values("rollout_log_probs", row), run.values("ref_log_prob", row)), color: either, what: "log-prob minus that of the reference policy" },
    entropy: { label: "entropy", values: run.values("entropy", row), color: (value, most) => sequential(most ? value / most : 0), what: "darker: the policy was less sure" },
    version: { label: "version", values: run.version(row), color: (value) => `color-mix(in srgb, ${series(value)} 45%, transparent)`, what: "version of the weights that generated the token" },
    mask: { label: "mask", values: run.mask(row), color: (value) => (value ? "rgba(0,158,115,.35)" : "transparent"), what: "green: the policy generated the token, and it is trained on" },
  };
}

function difference(a: Float32Array | null, b: Float32Array | null): Float32Array | null { return a && b ? a.map((value, i) => value - b[i]!) : null; }

export function sample(runs: Run[]): Node {
  const { parts, query } = route();
  const which = Number(query.get("run") ?? 0), run = runs[which] ?? runs[0]!;
  const row = run.byKey.get(`${parts[0]}:${parts[1]}`);
  if (!row) return h("p", { class: "empty" }, "This trajectory was not recorded.");
  const all = shades(run, row);
  const by = all[query.get("by") ?? ""]?.values ? query.get("by")! : all["advantage"]!.values ? "advantage" : "log_prob";
  const [before, after] = [-1, 1].map((step) => neighbour(run, row, step));
  return h("section", {}, h("div", { class: "bar spread" }, crumbs(row.step, row.uid, which, row.key.slice(row.uid.length + 1)),
    h("span", {}, step("before", "\u2039", before, runs, run), step("after", "\u203a", after, runs, run))),
    facts(row),
    h("div", { class: "card" }, h("h3", {}, "Prompt", h("small", {}, `${row.promptTokens} tokens`)), h("pre", { class: "text" }, brief(row.prompt, 20000))),
    h("div", { class: "card" }, h("h3", {}, "Response", h("small", {}, `${row.length} tokens`)),
      h("div", { class: "seg", role: "tablist", "aria-label": "colour tokens by" }, ...Object.entries(all).map(([name, shade]) =>
        h("button", { role: "tab", class: name === by ? "on" : "", "aria-selected": String(name === by), disabled: !shade.values,
          title: shade.values ? shade.what : "not computed in this run", click: () => change({ by: name }) }, shade.label))),
      h("p", { class: "hint" }, all[by]!.what), strip(run, row, all, by)), row.length <= 64 ? table(run, row, all) : null,
    runs.length > 1 ? other(runs, run, row) : null);
}

function step(id: string, text: string, row: Trajectory | undefined, runs: Run[], run: Run): Node {
  return row ? h("a", { class: "button", id, href: sampleLink(runs, run, row), "aria-label": `response ${id}` }, text) : h("span", { class: "button off" }, text);
}

function facts(row: Trajectory): Node {
  const pairs: [string, Node | string][] = [["reward", row.failure ? "failed" : num(row.score)], ["advantage", signed(row.advantage)], ["recorded as", row.why]];
  for (const [name, value] of Object.entries(row.reward)) if (name !== "score") pairs.push([name, num(value)]);
  for (const [name, text] of Object.entries(row.texts)) pairs.push([name, brief(text, 120)]);
  if (row.truth) pairs.push(["ground truth", brief(row.truth, 120)]);
  if (row.source) pairs.push(["data source", brief(row.source, 60)]);
  if (row.turns > 1 || row.toolCalls) pairs.push(["turns", `${row.turns}, ${row.toolCalls} tool calls`]);
  if (row.finish) pairs.push(["finish reason", brief(row.finish, 60)]);
  pairs.push(["weights", row.versions.map(([version]) => `v${version}`).join(", ")]);
  if (!Number.isNaN(row.gap)) pairs.push(["largest gap", num(row.gap)]);
  return h("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [h("div", {}, h("dt", {}, name), h("dd", {}, value))]),
    row.failure ? h("div", { class: "failure" }, h("dt", {}, "failure"), h("dd", {}, visible(row.failure))) : null);
}

function strip(run: Run, row: Trajectory, all: Record<string, Shade>, by: string): Node {
  const tokens = run.tokens(row), shade = all[by]!, values = shade.values, mask = run.mask(row);
  let most = 0;
  if (values) for (let i = 0; i < values.length; i++) most = Math.max(most, Math.abs(values[i]!));
  const readout = h("output", { class: "readout" }, "point at a token, or move with the arrow keys");
  const box = h("div", { class: "strip", tabindex: 0, "aria-label": "tokens of the response" });
  let shown = 0, at = -1;
  const more = h("button", { click: () => add() });
  const add = (): void => {
    const end = Math.min(tokens.length, shown + CHUNK);
    const parts = document.createDocumentFragment();
    for (let i = shown; i < end; i++) {
      const text = tokens[i]!.text;
      const span = h("span", { class: mask[i] ? "tok" : "tok off", "data-i": i }, visible(text) || "\u2205");
      if (values) span.style.backgroundColor = shade.color(values[i]!, most);
      parts.append(span);
      if (text.includes("\n")) parts.append(h("br"));
    }
    shown = end;
    more.remove();
    box.append(parts);
    if (shown < tokens.length) { more.textContent = `show ${Math.min(CHUNK, tokens.length - shown)} more of ${tokens.length}`; box.append(more); }
  };
  const point = (i: number): void => {
    if (i < 0 || i >= shown) return;
    box.querySelector(".tok.at")?.classList.remove("at");
    const span = box.querySelector(`[data-i="${i}"]`);
    span?.classList.add("at");
    at = i;
    readout.replaceChildren(h("b", {}, `${i}`), ` ${visible(tokens[i]!.text)} (id ${tokens[i]!.id}) `, ...Object.values(all).filter((one) => one.values)
      .map((one) => h("span", {}, `${one.label} `, h("b", {}, num(one.values![i])))));
  };
  box.addEventListener("pointerover", (event) => { const i = (event.target as HTMLElement).dataset?.["i"]; if (i !== undefined) point(Number(i)); });
  box.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    point(event.key === "ArrowRight" ? at + 1 : at - 1);
    event.preventDefault();
  });
  add();
  return h("div", {}, box, readout);
}

/** All columns of a short response as numbers. */
function table(run: Run, row: Trajectory, all: Record<string, Shade>): Node {
  const shown = Object.values(all).filter((shade) => shade.values);
  return h("div", { class: "card" }, h("h3", {}, "Columns"), h("div", { class: "scroll" }, h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, ...["#", "token", "id", ...shown.map((shade) => shade.label)].map((name, i) => h("th", { class: i > 1 ? "n" : "" }, name)))),
    h("tbody", {}, ...run.tokens(row).map((token, i) => h("tr", {}, h("td", {}, i), h("td", { class: "text" }, visible(token.text)), h("td", { class: "n" }, token.id),
      ...shown.map((shade) => h("td", { class: "n" }, num(shade.values![i])))))))));
}

/** The same prompt in the other run. */
function other(runs: Run[], run: Run, row: Trajectory): Node {
  const there = runs.find((one) => one !== run)!;
  const same = there.trajectories.filter((one) => one.prompt === row.prompt);
  return h("div", { class: "card" }, h("h3", {}, `The same prompt in ${there.name}`), same.length
    ? h("table", { class: "plain" }, h("tbody", {}, ...same.slice(0, 24).map((one) => h("tr", {}, h("td", {}, `step ${one.step}`),
      h("td", { class: "text" }, h("a", { href: link("sample", [one.step, one.key], { run: runs.indexOf(there) || null }) }, brief(one.response, 100))),
      h("td", { class: "n" }, num(one.score))))))
    : h("p", { class: "hint" }, "This prompt was not recorded there."));
}
