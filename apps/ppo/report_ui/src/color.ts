// Colours that people with any kind of colour vision can tell apart (Okabe and Ito).

export const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7d00", "#7b5ea7"];
export const PALETTE_DARK = ["#5aa9e6", "#f0b429", "#2cc295", "#e39cc5", "#8fd0f5", "#ff8a4c", "#d6c92e", "#b59be0"];

export function isDark(): boolean {
  const chosen = document.documentElement.dataset["theme"];
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function series(i: number): string { return (isDark() ? PALETTE_DARK : PALETTE)[i % PALETTE.length]!; }

export function css(name: string): string { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

/** Orange below zero, blue above; `share` of the strongest is in -1..1. */
export function diverging(share: number): string {
  const alpha = Math.min(1, Math.abs(share)) * 0.75;
  return share < 0 ? `rgba(213,94,0,${alpha.toFixed(3)})` : `rgba(0,114,178,${alpha.toFixed(3)})`;
}

/** One hue; `share` is in 0..1. */
export function sequential(share: number): string { return `rgba(204,121,167,${(Math.min(1, Math.max(0, share)) * 0.8).toFixed(3)})`; }

/** Black or white, whichever is easier to read on a colour given as #rrggbb. */
export function textOn(color: string): string {
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16) / 255).map((v) => (v <= 0.04 ? v / 12.9 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r! + 0.7152 * g! + 0.0722 * b! > 0.2 ? "#0b1117" : "#ffffff";
}
