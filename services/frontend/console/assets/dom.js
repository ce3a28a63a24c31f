// Elements and words. Text is only ever set as text: nothing that the mesh says can become markup.

/** An element with attributes, listeners (`onclick` ...) and children, which are elements or text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** Sets an element's text if it is another one: an unchanged node keeps selections, focus and screen readers quiet. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Made once: `toLocaleString` makes one for each number, which was most of what a frame of a long table took.
const formats = [0, 1, 2, 3, 4].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));

/** A number that was not measured is a dash. `digits` behind the point: 4 at most. */
export function number(value, digits = 0) {
  return value == null || value === -1 ? "–" : formats[digits].format(value);
}

export function ms(value) {
  if (value == null || value === -1) return "–";
  if (value >= 10000) return `${number(value / 1000, 1)} s`;
  return `${number(value, value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

export function percent(share) {
  return share == null || share < 0 ? "–" : `${number(100 * share, share < 0.995 && share > 0 ? 1 : 0)} %`;
}

let timeZone; // undefined: the browser's

/** From now on times are those of a simulation, which begin at 0. */
export function useSimulatedTime() {
  timeZone = "UTC";
}

export const isSimulatedTime = () => timeZone !== undefined;

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString("en-GB", { timeZone });
}

const taken = new Map();

/** An id that nothing else in the page has: two runs side by side have the same views. */
export function unique(name) {
  taken.set(name, (taken.get(name) ?? 0) + 1);
  return taken.get(name) === 1 ? name : `${name}-${taken.get(name)}`;
}

/** A heading with what stands under it. */
export function section(title, ...children) {
  const id = unique(`s-${title.toLowerCase().replace(/[^a-z]+/g, "-")}`);
  return h("section", { "aria-labelledby": id }, h("h2", { id }, title), ...children);
}

/** Rewrites what `element` holds only when `value` has changed since the last time. */
export function redraw(element, value, draw) {
  const text = JSON.stringify(value);
  if (element.dataset.drawn === text) return;
  element.dataset.drawn = text;
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  element.replaceChildren(...draw(value));
  if (focused) [...element.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus();
}
