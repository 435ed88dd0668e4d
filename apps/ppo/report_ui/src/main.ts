import { forgetCharts } from "./chart";
import { compare, config } from "./compare";
import { curves } from "./curves";
import { readRuns, type Run } from "./data";
import { h } from "./dom";
import { overview } from "./overview";
import { link, route } from "./route";
import { sample } from "./sample";
import { group, samples } from "./samples";
import { timeline } from "./timeline";

const VIEWS: Record<string, (runs: Run[]) => Node> = { overview, curves, timeline, samples, compare, config, group, sample };
const TABS = ["overview", "curves", "timeline", "samples", "compare", "config"];
const KEYS = [["1 \u2013 6", "views"], ["/", "search"], ["[ ]", "previous, next step or response"], ["t", "light or dark"], ["?", "this help"]];
let help: HTMLDialogElement;

function render(runs: Run[], main: HTMLElement, tabs: HTMLElement): void {
  const { view } = route();
  const chosen = VIEWS[view] ? view : "overview";
  forgetCharts();
  tabs.replaceChildren(...TABS.filter((name) => name !== "compare" || runs.length > 1).map((name) =>
    h("a", { href: link(name), class: name === chosen || (name === "samples" && (chosen === "group" || chosen === "sample")) ? "on" : "",
      ...(name === chosen ? { "aria-current": "page" } : {}) }, name)));
  main.replaceChildren(VIEWS[chosen]!(runs));
  document.title = `${runs.map((run) => run.name).join(" and ")} \u00b7 ${chosen}`;
}

function header(runs: Run[], tabs: HTMLElement): HTMLElement {
  const state = (run: Run): Node => h("span", { class: `state ${run.header.outcome.state}` }, run.header.outcome.state);
  return h("header", { class: "top" }, h("div", { class: "runs" }, ...runs.map((run, i) =>
    h("h1", {}, runs.length > 1 ? h("b", {}, "AB"[i]!) : null, h("span", {}, run.name), state(run)))),
    h("div", { class: "side" }, tabs, h("button", { "aria-label": "keys", click: () => help.showModal() }, "?"),
      h("button", { "aria-label": "light or dark", click: toggleTheme }, "\u25d0")));
}

function toggleTheme(): void {
  const dark = document.documentElement.dataset["theme"]
    ? document.documentElement.dataset["theme"] === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset["theme"] = dark ? "light" : "dark";
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

function press(event: KeyboardEvent, runs: Run[]): void {
  const typing = event.target instanceof HTMLInputElement || event.target instanceof HTMLSelectElement;
  if (event.key === "Escape" && typing) (event.target as HTMLElement).blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const shown = TABS.filter((name) => name !== "compare" || runs.length > 1);
  const tab = shown[Number(event.key) - 1];
  if (tab) location.hash = link(tab);
  else if (event.key === "/") document.getElementById("search")?.focus();
  else if (event.key === "[") document.getElementById("before")?.click();
  else if (event.key === "]") document.getElementById("after")?.click();
  else if (event.key === "t") toggleTheme();
  else if (event.key === "?") help.showModal();
  else return;
  event.preventDefault();
}

async function start(): Promise<void> {
  const app = document.getElementById("app")!;
  try {
    const runs = await readRuns(document.getElementById("data")!);
    const tabs = h("nav", { class: "tabs", "aria-label": "views" }), main = h("main");
    help = h("dialog", { class: "help" }, h("h3", {}, "Keys"), h("table", { class: "plain" }, h("tbody", {}, ...KEYS.map(([key, what]) =>
      h("tr", {}, h("td", {}, h("kbd", {}, key)), h("td", {}, what))))), h("button", { click: () => help.close() }, "close"));
    app.replaceChildren(header(runs, tabs), main, help);
    window.addEventListener("hashchange", () => render(runs, main, tabs));
    window.addEventListener("keydown", (event) => press(event, runs));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => render(runs, main, tabs));
    render(runs, main, tabs);
    document.documentElement.dataset["ready"] = String(Math.round(performance.now()));
  } catch (error) {
    app.replaceChildren(h("p", { class: "empty" }, `The report can't be shown: ${String(error)}`));
    throw error;
  }
}

void start();
