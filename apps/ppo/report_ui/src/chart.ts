// One chart: uPlot with a cursor that all charts share, zoom by dragging and links to steps.

import uPlot from "uplot";
import { css, series } from "./color";
import { h, num } from "./dom";

export interface Line { label: string; points: [number, number][]; color: number; dash?: boolean }

const sync = uPlot.sync("steps");
const live: { plot: uPlot; box: HTMLElement }[] = [];
let range: [number, number] | null = null;

export function forgetCharts(): void { for (const { plot } of live.splice(0)) plot.destroy(); }

window.addEventListener("resize", () => { for (const { plot, box } of live) plot.setSize({ width: box.clientWidth, height: plot.height }); });

export function setRange(next: [number, number] | null): void {
  range = next;
  for (const { plot } of live) plot.setScale("x", next ? { min: next[0], max: next[1] } : full(plot));
}

function full(plot: uPlot): { min: number; max: number } {
  const xs = plot.data[0];
  return { min: xs[0] ?? 0, max: xs[xs.length - 1] ?? 1 };
}

/** The range of a curve that never changes. */
function flatRange(value: number): [number, number] { const pad = Math.abs(value) * 0.1 || 1; return [value ? value - pad : 0, value + pad]; }

/** A chart of lines over steps; `onStep` is called with the step that is clicked. */
export function chart(title: string, lines: Line[], onStep: (step: number) => void, height = 170): HTMLElement {
  const plotBox = h("div", { class: "plot" });
  const readout = h("div", { class: "legend" });
  const box = h("figure", { class: "chart" }, h("figcaption", {}, title), readout, plotBox);
  const xs = [...new Set(lines.flatMap((line) => line.points.map(([x]) => x)))].sort((a, b) => a - b);
  const columns = lines.map((line) => { const known = new Map(line.points); return xs.map((x) => known.get(x) ?? null); });
  const show = (index: number | null | undefined): void => {
    readout.replaceChildren(...lines.map((line, i) => {
      const value = index === null || index === undefined ? line.points.at(-1)?.[1] : columns[i]![index];
      const dot = h("i", { class: line.dash ? "dot dashed" : "dot" });
      dot.style.background = series(line.color);
      return h("span", {}, dot, `${line.label} `, h("b", {}, num(value ?? null)));
    }), h("span", { class: "at" }, index === null || index === undefined ? "last" : `step ${xs[index]}`));
  };
  show(null);
  queueMicrotask(() => requestAnimationFrame(() => draw()));
  const draw = (): void => {
    if (!plotBox.isConnected || !xs.length) return;
    const axis = { stroke: css("--muted"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const plot = new uPlot({
      width: plotBox.clientWidth, height, legend: { show: false },
      scales: { x: { time: false }, y: { range: (_u, low, high) => (low === high ? flatRange(low) : uPlot.rangeNum(low, high, 0.1, true) as [number, number]) } },
      cursor: { sync: { key: sync.key, setSeries: false }, drag: { x: true, y: false }, points: { size: 6 } },
      axes: [{ ...axis, size: 24 }, { ...axis, size: 52, values: (_: uPlot, ticks: number[]) => ticks.map(num) }],
      series: [{}, ...lines.map((line) => ({
        label: line.label, stroke: series(line.color), width: line.dash ? 1 : 1.75, spanGaps: true,
        ...(line.dash ? { dash: [4, 4] } : {}), points: { show: line.points.length < 40, size: 4, fill: series(line.color) },
      }))],
      hooks: { setCursor: [(u: uPlot) => show(u.cursor.idx)], setSelect: [(u: uPlot) => {
        if (u.select.width > 4) setRange([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
      }] },
    }, [xs, ...columns] as uPlot.AlignedData, plotBox);
    sync.sub(plot);
    let down = 0;
    plot.over.addEventListener("mousedown", (event) => { down = event.clientX; });
    plot.over.addEventListener("click", (event) => {
      const index = plot.cursor.idx;
      if (Math.abs(event.clientX - down) < 3 && index !== null && index !== undefined) onStep(xs[index]!);
    });
    plot.over.addEventListener("dblclick", () => setRange(null));
    live.push({ plot, box: plotBox });
    if (range) plot.setScale("x", { min: range[0], max: range[1] });
  };
  return box;
}
