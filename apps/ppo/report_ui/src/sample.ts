// One trajectory as a strip of tokens, coloured by one of its columns.

import { diverging, sequential, series } from "./color";
import type { Run, Trajectory } from "./data";
import { brief, count, h, num, visible } from "./dom";
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
    h("div", { class: "card" }, h("h3", {}, "Prompt", h("small", {}, count(row.promptTokens, "token"))), h("pre", { class: "text" }, brief(row.prompt, 20000))),
    h("div", { class: "card" }, h("h3", {}, "Response", h("small", {}, count(row.length, "token"))),
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
  if (row.turns > 1 || row.toolCalls) pairs.push(["turns", `${row.turns}, ${count(row.toolCalls, "tool call")}`]);
  if (row.finish) pairs.push(["finish reason", brief(row.finish, 60)]);
  pairs.push(["weights", row.versions.map(([version]) => `v${version}`).join(", ")]);
  if (!Number.isNaN(row.gap)) pairs.push(["largest gap", num(row.gap)]);
  return h("dl", { class: "facts" }, ...pairs.flatMap(([name, value]) => [h("div", {}, h("dt", {}, name), h("dd", {}, value))]),
    row.failure ? h("div", { class: "failure" }, h("dt", {}, "failure"), h("dd", {}, visible(row.failure))) : null);
}

interface Turn { from: number; to: number; own: boolean }

/** Runs of tokens that the policy generated, and of those that it was given between them. */
function turnsOf(mask: ArrayLike<number>): Turn[] {
  const found: Turn[] = [];
  for (let i = 0; i < mask.length; i++) {
    const own = Boolean(mask[i]), last = found.at(-1);
    if (last && last.own === own) last.to = i + 1; else found.push({ from: i, to: i + 1, own });
  }
  return found;
}

function strip(run: Run, row: Trajectory, all: Record<string, Shade>, by: string): Node {
  const tokens = run.tokens(row), shade = all[by]!, values = shade.values, mask = run.mask(row);
  let most = 0;
  if (values) for (let i = 0; i < values.length; i++) if (!Number.isNaN(values[i])) most = Math.max(most, Math.abs(values[i]!));
  const readout = h("output", { class: "readout" }, "point at a token, or move with the arrow keys");
  const box = h("div", { class: "strip", tabindex: 0, "aria-label": "tokens of the response" });
  const part = (from: number, to: number): HTMLElement => {
    let shown = from;
    const body = h("div"), more = h("button", { click: () => add() });
    const add = (): void => {
      const end = Math.min(to, shown + CHUNK);
      const parts = document.createDocumentFragment();
      for (; shown < end; shown++) {
        const text = tokens[shown]!.text;
        const span = h("span", { class: mask[shown] ? "tok" : "tok off", "data-i": shown }, visible(text) || "\u2205");
        if (values && !Number.isNaN(values[shown])) span.style.backgroundColor = shade.color(values[shown]!, most);
        parts.append(span);
        if (text.includes("\n")) parts.append(h("br"));
      }
      more.remove();
      body.append(parts);
      if (shown < to) { more.textContent = `show ${Math.min(CHUNK, to - shown)} more of ${to - from}`; body.append(more); }
    };
    add();
    return body;
  };
  const turns = turnsOf(mask);
  let own = 0;
  box.append(...(turns.length < 2 ? [part(0, tokens.length)] : turns.map((turn) => folded(turn, tokens, turn.own ? `turn ${++own}` : "observation", part))));
  let at = -1;
  const point = (span: HTMLElement): void => {
    box.querySelector(".tok.at")?.classList.remove("at");
    span.classList.add("at");
    const i = at = Number(span.dataset["i"]);
    readout.replaceChildren(h("b", {}, `${i}`), ` ${visible(tokens[i]!.text)} (id ${tokens[i]!.id}) `, ...Object.values(all).filter((one) => one.values)
      .map((one) => h("span", {}, `${one.label} `, h("b", {}, num(one.values![i])))));
  };
  box.addEventListener("pointerover", (event) => { const span = event.target as HTMLElement; if (span.dataset?.["i"] !== undefined) point(span); });
  box.addEventListener("keydown", (event) => {
    const move = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!move) return;
    const open = [...box.querySelectorAll<HTMLElement>(".tok")].filter((span) => !span.closest("details:not([open])"));
    const now = open.findIndex((span) => Number(span.dataset["i"]) === at), next = open[now < 0 ? 0 : now + move];
    if (next) point(next);
    event.preventDefault();
  });
  return h("div", {}, box, readout);
}

/** One turn, open, or what the policy was given between two turns, folded. */
function folded(turn: Turn, tokens: { text: string }[], name: string, part: (from: number, to: number) => HTMLElement): HTMLElement {
  const start = tokens.slice(turn.from, Math.min(turn.to, turn.from + 60)).map(({ text }) => text).join("");
  const details = h("details", { class: "turn", open: turn.own }, h("summary", {}, h("b", {}, name), ` ${count(turn.to - turn.from, "token")} `, h("span", { class: "start" }, brief(start, 90))));
  const fill = (): void => { if (details.open && details.childElementCount < 2) details.append(part(turn.from, turn.to)); };
  details.addEventListener("toggle", fill);
  fill();
  return details;
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
