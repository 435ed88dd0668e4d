// Builds elements. All text goes in as text nodes: no string is ever parsed as markup.

export type Child = Node | string | number | null | undefined | false;
type Props = Record<string, string | number | boolean | null | undefined | ((event: never) => void)>;

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K, props: Props = {}, ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name, value as EventListener);
    else if (name === "class") element.className = String(value);
    else if (name === "value") (element as HTMLInputElement).value = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((c): c is Node | string | number => c !== null && c !== undefined && c !== false)
    .map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

const NAMED: Record<string, string> = { "\n": "\u23ce", "\t": "\u21e5", "\r": "\u240d" };

/** A text with its invisible and direction-changing characters made visible. */
export function visible(text: string): string {
  // eslint-disable-next-line no-control-regex
  return text.replace(/[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g, (char) =>
    NAMED[char] ?? `\u27e8U+${char.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`);
}

/** One line of at most `length` characters. */
export function brief(text: string, length = 160): string {
  const line = visible(text.length > 4 * length ? text.slice(0, 4 * length) : text);
  return line.length > length || text.length > 4 * length ? `${line.slice(0, length - 1)}\u2026` : line;
}

/** A number for people: four significant digits. */
export function num(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace("-", "\u2212").replace("e\u2212", "e-");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(size >= 100 ? 4 : 3))).replace("-", "\u2212");
}

/** A number of things, such as `1 token` or `2 tokens`. */
export function count(n: number, thing: string): string { return `${n.toLocaleString("en")} ${thing}${n === 1 ? "" : "s"}`; }

export function seconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 120) return `${num(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  for (; value >= 1024 && power < units.length - 1; power++) value /= 1024;
  return `${num(value)} ${units[power]}`;
}
