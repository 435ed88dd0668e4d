// A list that makes elements only for the rows in sight.

import { h } from "./dom";

export function virtualList(count: number, rowHeight: number, row: (index: number) => HTMLElement, selected: number): HTMLElement {
  const inner = h("div", { class: "inner" });
  inner.style.height = `${count * rowHeight}px`;
  const box = h("div", { class: "virtual", tabindex: 0, id: "list" }, inner);
  let shown = "";
  const paint = (): void => {
    const from = Math.max(0, Math.floor(box.scrollTop / rowHeight) - 8);
    const to = Math.min(count, from + Math.ceil((box.clientHeight || 600) / rowHeight) + 16);
    if (shown === `${from}-${to}`) return;
    shown = `${from}-${to}`;
    inner.replaceChildren(...Array.from({ length: to - from }, (_, i) => {
      const element = row(from + i);
      element.style.top = `${(from + i) * rowHeight}px`;
      element.style.height = `${rowHeight}px`;
      return element;
    }));
  };
  box.addEventListener("scroll", paint, { passive: true });
  requestAnimationFrame(() => {
    box.style.maxHeight = `${Math.max(240, window.innerHeight - box.getBoundingClientRect().top - 70)}px`;
    if (selected > 3) box.scrollTop = (selected - 3) * rowHeight;
    paint();
  });
  paint();
  return box;
}
