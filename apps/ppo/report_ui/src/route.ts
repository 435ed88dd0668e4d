// The URL hash names the view and all of its state: `#view/part?name=value`.

export interface Route { view: string; parts: string[]; query: URLSearchParams }

export function route(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const [view = "", ...parts] = path.split("/").map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  return { view: view || "overview", parts, query: new URLSearchParams(query) };
}

export function link(view: string, parts: (string | number)[] = [], query: Record<string, string | number | null | undefined> = {}): string {
  const path = [view, ...parts.map((part) => encodeURIComponent(part))].join("/");
  const named = Object.entries(query).filter((pair): pair is [string, string | number] => pair[1] !== null && pair[1] !== undefined && pair[1] !== "");
  const search = new URLSearchParams(named.map(([name, value]) => [name, String(value)])).toString();
  return `#${path}${search ? `?${search}` : ""}`;
}

/** Changes parts of the query; without a new entry of the history. */
export function change(changes: Record<string, string | number | null>): void {
  const { view, parts, query } = route();
  history.replaceState(null, "", link(view, parts, { ...Object.fromEntries(query), ...changes }));
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}
