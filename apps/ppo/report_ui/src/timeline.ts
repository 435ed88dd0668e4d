// Every worker's calls on one canvas: wheel or keys + - to zoom, drag to move.

import { css, series, textOn } from "./color";
import type { Run, Span } from "./data";
import { bytes, h, seconds } from "./dom";
import { link, route } from "./route";

const ROW = 30, TOP = 26, LEFT = 132;
const NOTHING = "no worker";
interface Lane { name: string; spans: (Span & { label: string; color: string })[] }
let view: { from: number; to: number } | null = null;

export function timeline(runs: Run[]): Node {
  const { query } = route();
  const which = Number(query.get("run") ?? 0);
  const run = runs[which] ?? runs[0]!;
  const lanes = lanesOf(run);
  const times = lanes.flatMap((lane) => lane.spans.flatMap((span) => [span.began, span.ended]));
  if (!times.length) return h("p", { class: "empty" }, "The run has recorded no calls of workers.");
  const begin = times.reduce((a, b) => Math.min(a, b)), end = times.reduce((a, b) => Math.max(a, b));
  const [from, to] = [query.get("from"), query.get("to")].map((text) => (text === null ? NaN : begin + Number(text)));
  const training = run.ends.at(Math.min(3, run.ends.length - 1))?.at;
  view = Number.isFinite(from) && Number.isFinite(to) ? { from: from!, to: to! } : { from: run.ends[0]?.at ?? begin, to: training ?? end };
  if (view.to <= view.from) view = { from: begin, to: end };
  const canvas = h("canvas", { class: "timeline", tabindex: 0, "aria-label": "calls of every worker over time" });
  const tip = h("div", { class: "tip", hidden: true });
  const paint = (): void => draw(canvas, lanes, run, begin);
  connect(canvas, tip, lanes, begin, end, paint);
  requestAnimationFrame(paint);
  const set = (a: number, b: number): void => { view = { from: a, to: b }; paint(); remember(begin); };
  return h("section", {}, h("div", { class: "bar" },
    runs.length > 1 ? h("span", { class: "seg" }, ...runs.map((_, i) => h("a", { href: link("timeline", [], { run: i }), class: i === which ? "on" : "" }, "AB"[i]!))) : null,
    h("button", { click: () => set(begin, end) }, "whole run"),
    h("button", { click: () => set(begin, run.ends[0]?.at ?? end) }, "start"),
    ...run.ends.length > 2 ? [h("button", { click: () => set(run.ends.at(-3)!.at, end) }, "last steps")] : [],
    h("span", { class: "hint" }, "wheel or + \u2212: zoom \u00b7 drag: move")), h("div", { class: "card flush" }, canvas, tip), totals(run));
}

function lanesOf(run: Run): Lane[] {
  const { workers, stages, } = run.header.spans as { workers: string[]; stages: string[] };
  const busy = new Map<string, number>();
  for (const span of run.spans) busy.set(stages[span.stage]!, (busy.get(stages[span.stage]!) ?? 0) + span.ended - span.began);
  const order = [...busy.entries()].filter(([name]) => name !== "build").sort((a, b) => b[1] - a[1]).map(([name]) => name);
  const color = (stage: string): string => (stage === "build" ? css("--muted") : series(order.indexOf(stage)));
  const phases: Lane = { name: "start", spans: (run.header.phases as [string, number, number][]).map(([label, began, ended], i) =>
    ({ worker: -1, stage: -1, began, ended, label, color: series(i) })) };
  const lanes = workers.map((name, i): Lane[] => {
    const own = run.spans.filter((span) => span.worker === i).sort((a, b) => a.began - b.began)
      .map((span) => ({ ...span, label: stages[span.stage]!, color: color(stages[span.stage]!) }));
    const rows: Lane[] = [];  // calls that overlap get rows of their own
    for (const span of own) {
      let row = rows.find((one) => one.spans.at(-1)!.ended <= span.began + 1e-4);
      if (!row && rows.length < 6) { row = { name: rows.length ? "" : name, spans: [] }; rows.push(row); }
      (row ?? rows.at(-1)!).spans.push(span);
    }
    return rows;
  }).flat();
  const syncs: Lane = { name: "weight sync", spans: run.syncs.map(([began, ended, version, size, receivers]) =>
    ({ worker: -1, stage: -1, began, ended, label: `version ${version}, ${bytes(size)} to ${receivers}`, color: css("--muted") })) };
  return [phases, ...lanes, syncs].filter((lane) => lane.spans.length);
}

function draw(canvas: HTMLCanvasElement, lanes: Lane[], run: Run, begin: number): void {
  if (!view || !canvas.isConnected) return;
  const width = canvas.parentElement!.clientWidth, height = TOP + lanes.length * ROW + 6, ratio = devicePixelRatio || 1;
  canvas.width = width * ratio; canvas.height = height * ratio;
  canvas.style.height = `${height}px`;
  const c = canvas.getContext("2d")!;
  c.scale(ratio, ratio);
  const left = width < 600 ? 74 : LEFT, scale = (width - left) / (view.to - view.from);
  const x = (at: number): number => left + (at - view!.from) * scale;
  c.font = "11px system-ui, sans-serif";
  c.fillStyle = css("--muted"); c.strokeStyle = css("--line");
  for (const { at } of run.ends) {
    if (at < view.from || at > view.to) continue;
    c.beginPath(); c.moveTo(x(at), 16); c.lineTo(x(at), height); c.stroke();
  }
  let free = left;
  for (let i = 1; i < run.ends.length; i++) {
    const from = x(run.ends[i - 1]!.at), to = x(run.ends[i]!.at), label = `step ${run.ends[i]!.step}`, size = c.measureText(label).width;
    const middle = (Math.max(from, left) + Math.min(to, width)) / 2 - size / 2;
    if (to > left && from < width && middle > free && middle + size < width) { c.fillText(label, middle, 12); free = middle + size + 10; }
  }
  lanes.forEach((lane, row) => {
    const y = TOP + row * ROW;
    c.fillStyle = css("--fill"); c.fillRect(left, y, width - left, ROW - 6);
    for (const span of lane.spans) {
      const a = Math.max(left, x(span.began)), b = Math.min(width, x(span.ended));
      if (b < left || a > width) continue;
      c.fillStyle = span.color; c.fillRect(a, y, Math.max(1, b - a), ROW - 6);
      if (b - a > c.measureText(span.label).width + 8) { c.fillStyle = textOn(span.color); c.fillText(span.label, a + 4, y + 15.5); }
    }
    c.fillStyle = css("--text"); c.fillText(lane.name, 8, y + 15.5, left - 14);
  });
  c.fillStyle = css("--muted"); c.fillText(`+${seconds(Math.max(0, view.from - begin))}`, 8, 12);
}

function remember(begin: number): void {
  if (!view) return;
  const { query, parts } = route();
  history.replaceState(null, "", link("timeline", parts, { ...Object.fromEntries(query), from: (view.from - begin).toFixed(3), to: (view.to - begin).toFixed(3) }));
}

function connect(canvas: HTMLCanvasElement, tip: HTMLElement, lanes: Lane[], begin: number, end: number, paint: () => void): void {
  const left = (): number => (canvas.clientWidth < 600 ? 74 : LEFT);
  const at = (x: number): number => view!.from + ((x - left()) / (canvas.clientWidth - left())) * (view!.to - view!.from);
  const zoom = (factor: number, center: number): void => {
    view = { from: Math.max(begin - 1, center - (center - view!.from) * factor), to: Math.min(end + 1, center + (view!.to - center) * factor) };
    paint(); remember(begin);
  };
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(event.deltaY > 0 ? 1.25 : 0.8, at(event.offsetX)); }, { passive: false });
  canvas.addEventListener("keydown", (event) => {
    const middle = (view!.from + view!.to) / 2, third = (view!.to - view!.from) / 3;
    if (event.key === "+") zoom(0.7, middle);
    else if (event.key === "-") zoom(1.4, middle);
    else if (event.key === "ArrowLeft") { view = { from: view!.from - third, to: view!.to - third }; paint(); }
    else if (event.key === "ArrowRight") { view = { from: view!.from + third, to: view!.to + third }; paint(); }
    else return;
    event.preventDefault();
  });
  let drag: { x: number; from: number; to: number } | null = null;
  canvas.addEventListener("pointerdown", (event) => { drag = { x: event.offsetX, ...view! }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", () => { drag = null; remember(begin); });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const shift = ((drag.x - event.offsetX) / (canvas.clientWidth - left())) * (drag.to - drag.from);
      view = { from: drag.from + shift, to: drag.to + shift };
      paint();
      return;
    }
    const time = at(event.offsetX), lane = lanes[Math.floor((event.offsetY - TOP) / ROW)];
    const span = lane?.spans.find((one) => one.began <= time && time <= one.ended);
    tip.hidden = !span;
    if (!span) return;
    tip.textContent = `${span.label} \u00b7 ${seconds(span.ended - span.began)}`;
    tip.style.left = `${Math.min(event.offsetX + 12, canvas.clientWidth - 170)}px`;
    tip.style.top = `${event.offsetY + 14}px`;
  });
}

interface Share { busy: number; stages: Map<string, number>; idle: Map<string, number> }

const add = (sums: Map<string, number>, name: string, value: number): void => { sums.set(name, (sums.get(name) ?? 0) + value); };

/** What each worker did between two times and, while it was idle, what the others did; seconds. */
function shares(run: Run, first: number, last: number): Share[] {
  const { workers, stages } = run.header.spans as { workers: string[]; stages: string[] };
  const found = workers.map((): Share => ({ busy: 0, stages: new Map(), idle: new Map() }));
  const running = workers.map(() => 0), active = new Map<string, number>();
  const marks: { at: number; worker: number; stage: string; change: number }[] = [];
  for (const { worker, stage: number, began, ended } of run.spans) {
    const [from, to, stage] = [Math.max(first, began), Math.min(last, ended), stages[number]!];
    if (to <= from) continue;
    add(found[worker]!.stages, stage, to - from);
    marks.push({ at: from, worker, stage, change: 1 }, { at: to, worker, stage, change: -1 });
  }
  marks.sort((a, b) => a.at - b.at);
  let now = first;
  const pass = (at: number): void => {
    const causes = active.size ? [...active.keys()] : [NOTHING];
    found.forEach((share, i) => {
      if (running[i]) share.busy += at - now;
      else for (const cause of causes) add(share.idle, cause, (at - now) / causes.length);
    });
    now = at;
  };
  for (const { at, worker, stage, change } of marks) {
    if (at > now) pass(at);
    running[worker]! += change;
    add(active, stage, change);
    if (!active.get(stage)) active.delete(stage);
  }
  pass(last);
  return found;
}

/** What each worker did with its time between the first and the last step. */
function totals(run: Run): Node {
  const { workers } = run.header.spans as { workers: string[] };
  const first = run.ends[0]?.at ?? 0, last = run.ends.at(-1)?.at ?? 0, whole = last - first;
  if (!(whole > 0)) return h("span");
  const percent = (value: number): string => `${Math.round((100 * value) / whole)}\u00a0%`;
  const listed = (sums: Map<string, number>): string => [...sums].filter(([, value]) => value >= whole / 200)
    .sort((a, b) => b[1] - a[1]).slice(0, 6).map(([name, value]) => `${name}\u00a0${percent(value)}`).join(" \u00b7 ");
  return h("div", { class: "card" }, h("h3", {}, "Share of the time in training"), h("div", { class: "scroll" }, h("table", { class: "plain" },
    h("thead", {}, h("tr", {}, h("th", {}, "worker"), h("th", { class: "n" }, "busy"), h("th", {}, "with"), h("th", { class: "n" }, "idle"), h("th", {}, "while others compute"))),
    h("tbody", {}, ...shares(run, first, last).map(({ busy, stages, idle }, i) => h("tr", {}, h("td", { class: "name" }, h("b", {}, workers[i]!)),
      h("td", { class: "n" }, percent(busy)), h("td", {}, listed(stages)), h("td", { class: "n" }, percent(whole - busy)), h("td", {}, listed(idle))))))),
    h("p", { class: "hint" }, `${NOTHING}: the driver or the data plane works`));
}
