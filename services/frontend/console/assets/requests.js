// Requests that run and have ended, and the story of one of them.

import { clock, h, ms, number, say, section, unique } from "./dom.js";
import { Table } from "./table.js";
import { placementArticle, storyLink } from "./views.js";

const AGAIN_MS = 2000;

export class Requests {
  /** `find(id)` gives the story of a request, or throws an Error that says why there is none; without `act` nothing can be done. */
  constructor(act, find) {
    this.act = act;
    this.find = find;
    this.note = h("p", { class: "note" });
    this.table = new Table("Requests", [
      { title: "request", text: (row) => row.request_id, cell: storyLink("request_id") },
      { title: "status", value: (row) => row.status, text: (row) => (row.status ? String(row.status) : "running"),
        cell: (td, row) => td.replaceChildren(h("span", { class: `state ${row.status >= 500 ? "bad" : row.status === 200 ? "ready" : "note"}` }, row.status ? String(row.status) : "running")) },
      { title: "model", value: (row) => row.model, text: (row) => (row.tier ? `${row.model} by ${row.tier}` : row.model) },
      { title: "instance", value: (row) => row.instance, text: (row) => row.instance },
      { title: "prompt", numeric: true, value: (row) => row.prompt_tokens, text: (row) => number(row.prompt_tokens) },
      { title: "cached", numeric: true, value: (row) => row.cached_tokens, text: (row) => (row.status ? number(row.cached_tokens) : "–") },
      { title: "answer", numeric: true, value: (row) => row.generated_tokens, text: (row) => number(row.generated_tokens) },
      { title: "time", numeric: true, value: (row) => row.age_ms, text: (row) => ms(row.age_ms) },
      { title: "TTFT", numeric: true, value: (row) => row.ttft_ms, text: (row) => ms(row.ttft_ms) },
      { title: "TPOT", numeric: true, value: (row) => row.tpot_ms, text: (row) => ms(row.tpot_ms) },
      { title: "moved", numeric: true, value: (row) => row.moves, text: (row) => number(row.moves) },
      { title: "recovered", numeric: true, value: (row) => row.recoveries, text: (row) => number(row.recoveries) },
      { title: "key", value: (row) => row.owner, text: (row) => row.owner },
      { title: "frontend", text: (row) => row.frontend },
    ], (row) => `${row.frontend} ${row.request_id}`, { tall: true, empty: "no request yet" });
    const id = unique("request-id");
    this.input = h("input", { id, type: "search", size: "44", spellcheck: "false", autocomplete: "off" });
    this.story = h("div", { id: unique("story"), role: "region", "aria-label": "Story of a request", "aria-live": "polite" });
    this.element = h("div", {},
      section("Story", h("form", { onsubmit: (event) => {
        event.preventDefault();
        const hash = `#requests/${encodeURIComponent(this.input.value.trim())}`;
        if (location.hash === hash) this.show(this.input.value.trim());
        else location.hash = hash;
      } }, h("label", { for: id }, "Request id "), this.input, " ", h("button", { type: "submit" }, "Show")), this.story),
      section("Requests", this.note, this.table.box));
    this.instances = [];
  }

  update({ body, instances }) {
    this.instances = instances;
    say(this.note, `${number(body.running_total)} run now, the ${number(Math.min(100, body.running_total))} oldest of them first; then those that ended last.`);
    this.table.update(body.requests);
  }

  /** Fetch and draw one request's story, again and again while it runs; an empty id takes it away. */
  async show(id) {
    this.input.value = this.shown = id;
    if (!id) this.story.replaceChildren();
    else await this.#fetch(id);
  }

  async #fetch(id) {
    let isRunning = false;
    try {
      const story = await this.find(id);
      if (this.shown !== id) return;
      isRunning = story.status === 0 && story.summary != null;
      this.#draw(story);
    } catch (error) {
      if (this.shown === id) this.story.replaceChildren(h("p", { class: "bad" }, error.message));
    }
    if (isRunning) setTimeout(() => this.#again(id), AGAIN_MS);
  }

  #again(id) {
    if (this.shown !== id || !this.element.isConnected) return;
    // Not while somebody chooses in it where the request is to go.
    if (this.story.contains(document.activeElement)) setTimeout(() => this.#again(id), AGAIN_MS);
    else this.#fetch(id);
  }

  #draw(story) {
    const whole = Math.max(1, story.total_ms, ...story.spans.map((span) => span.end_ms));
    const bar = (span) => {
      const piece = h("span", { class: span.is_bad ? "piece bad" : `piece ${span.name.split(" ")[0]}` });
      piece.style.marginLeft = `${(100 * span.start_ms) / whole}%`;
      piece.style.width = `${Math.max(0.4, (100 * (span.end_ms - span.start_ms)) / whole)}%`;
      return h("td", { class: "track", "aria-hidden": "true" }, piece);
    };
    const summary = story.summary;
    this.story.replaceChildren(
      h("h3", {}, story.request_id),
      h("p", {}, story.status ? `Status ${story.status}` : "It runs, or is not remembered by a frontend", `; ${story.model || "model unknown"}, arrived ${clock(story.arrived_unix_ms)}, ${ms(story.total_ms)} in all`,
        story.frontend ? ` at ${story.frontend}` : "",
        summary ? `; ${number(summary.prompt_tokens)} prompt tokens, ${number(summary.cached_tokens)} of them cached, ${number(summary.generated_tokens)} generated; moved ${summary.moves} times, recovered ${summary.recoveries} times` : "", "."),
      ...story.missing.map((what) => h("p", { class: "bad" }, what)),
      story.spans.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Waterfall" }, h("table", { class: "waterfall" },
        h("caption", { class: "hidden" }, "What the request spent its time on"),
        h("thead", {}, h("tr", {}, ...["span", "from", "took", "", "what"].map((title) => (title ? h("th", { scope: "col" }, title) : h("td", { class: "track-head" }))))),
        h("tbody", {}, ...story.spans.map((span) => h("tr", {},
          h("th", { scope: "row" }, span.name), h("td", { class: "number" }, ms(span.start_ms)), h("td", { class: "number" }, ms(span.end_ms - span.start_ms)), bar(span), h("td", {}, span.detail)))))) : null,
      ...(this.act && story.status === 0 && summary ? [this.#mover(story.request_id, summary.instance)] : []),
      ...story.moves.map((move) => h("p", { class: "note" }, `${clock(move.at_unix_ms)} ${move.source} to ${move.target}: ${move.outcome.replace("_", " ")}; ${move.reason}`)),
      story.placement ? placementArticle(story.placement) : "");
  }

  #mover(request, instance) {
    const others = this.instances.filter((row) => row.instance_id !== instance && row.state === "ready");
    const select = h("select", { id: "move-to" }, ...others.map((row) => h("option", {}, row.instance_id)));
    return h("p", {}, h("label", { for: "move-to" }, "Move it to "), select, " ",
      h("button", { type: "button", disabled: others.length === 0, onclick: () => this.act({ action: "migrate", request, to: select.value }) }, "Move"));
  }
}
