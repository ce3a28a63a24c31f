// Tables of any length: only the rows in sight are in the document, and of those only the cells that changed are written.

import { h, say } from "./dom.js";

const ROW_PX = 33;
const SPARE_ROWS = 6;
const collator = new Intl.Collator("en", { numeric: true });

/**
 * columns: {title, value(row) -> number or text to sort by, text(row) -> text, cell(td, row)?, numeric?, hint?}
 * `cell` draws something else than text into a cell, again only when `text(row)` has changed.
 */
export class Table {
  constructor(caption, columns, keyOf, { empty = "none", sortBy = null, descending = false, tall = false } = {}) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.rows = [];
    this.sortBy = sortBy;
    this.descending = descending;
    this.emptyText = empty;
    this.pool = [];
    this.heads = columns.map((column, index) => this.#head(column, index));
    this.before = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", { colspan: columns.length }));
    this.after = h("tr", { class: "spacer", "aria-hidden": "true" }, h("td", { colspan: columns.length }));
    this.body = h("tbody", {}, this.before, this.after);
    this.table = h("table", {}, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, ...this.heads)), this.body);
    this.nothing = h("p", { class: "empty" }, empty);
    this.element = h("div", { class: tall ? "scroll tall" : "scroll", tabindex: "0", role: "region", "aria-label": `Table: ${caption}`,
      onscroll: () => this.#measure() }, this.table);
    this.box = h("div", {}, this.element, this.nothing);
    [this.heightPx, this.topPx] = [0, 0];
    new ResizeObserver(() => this.#measure()).observe(this.element);
  }

  /** Shows these rows; the order is that of the chosen column, or theirs. */
  update(rows) {
    this.rows = rows;
    this.#draw();
  }

  #head(column, index) {
    if (!column.value) return h("th", { scope: "col", class: column.numeric ? "number" : null, title: column.hint }, column.title);
    const button = h("button", { type: "button", title: column.hint, onclick: () => this.#sort(index) }, column.title);
    return h("th", { scope: "col", class: column.numeric ? "number" : null }, button);
  }

  #sort(index) {
    if (this.sortBy === index) this.descending = !this.descending;
    else [this.sortBy, this.descending] = [index, Boolean(this.columns[index].numeric)];
    this.#draw();
  }

  #ordered() {
    if (this.sortBy == null) return this.rows;
    const { value } = this.columns[this.sortBy], sign = this.descending ? -1 : 1;
    const compare = (a, b) => (typeof a === "number" ? a - b : collator.compare(a, b));
    return [...this.rows].sort((a, b) => sign * compare(value(a) ?? -1, value(b) ?? -1));
  }

  /** Asked only when they change: asked while a frame is made, the browser would lay out the whole page for the answer. */
  #measure() {
    [this.heightPx, this.topPx] = [this.element.clientHeight, this.element.scrollTop];
    this.#schedule();
  }

  #schedule() {
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.#draw(); });
  }

  #draw() {
    this.heads.forEach((head, index) => {
      const order = this.sortBy === index ? (this.descending ? "descending" : "ascending") : "none";
      if (this.columns[index].value && head.getAttribute("aria-sort") !== order) head.setAttribute("aria-sort", order);
    });
    const rows = this.#ordered(), count = rows.length;
    this.nothing.hidden = count > 0;
    this.element.hidden = count === 0;
    this.table.setAttribute("aria-rowcount", count + 1);
    const inSight = Math.ceil((this.heightPx || 10 * ROW_PX) / ROW_PX) + 2 * SPARE_ROWS;
    const first = Math.max(0, Math.min(Math.floor(this.topPx / ROW_PX) - SPARE_ROWS, count - inSight));
    const shown = rows.slice(first, first + inSight);
    this.before.firstChild.style.height = `${first * ROW_PX}px`;
    this.after.firstChild.style.height = `${(count - first - shown.length) * ROW_PX}px`;
    this.before.hidden = first === 0;
    this.after.hidden = first + shown.length >= count;
    while (this.pool.length < shown.length) this.pool.push(this.#newRow());
    while (this.pool.length > shown.length) this.pool.pop().remove();
    shown.forEach((row, index) => this.#write(this.pool[index], row, first + index));
  }

  #newRow() {
    const row = h("tr", {}, ...this.columns.map((column, index) =>
      index === 0 ? h("th", { scope: "row" }) : h("td", { class: column.numeric ? "number" : null })));
    this.after.before(row);
    return row;
  }

  #write(tr, row, index) {
    const key = this.keyOf(row), isAnother = tr.dataset.row !== key;
    tr.dataset.row = key;
    tr.setAttribute("aria-rowindex", index + 2);
    this.columns.forEach((column, place) => {
      const cell = tr.children[place], text = column.text(row);
      if (!column.cell) say(cell, text);
      else if (isAnother || cell.dataset.drawn !== text) {
        cell.dataset.drawn = text;
        column.cell(cell, row);
      }
    });
  }
}
