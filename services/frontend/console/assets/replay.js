// A recording in place of the live feed: the same views, a time slider, and two runs side by side.

import { Autoscale } from "./autoscale.js";
import { Compare } from "./compare.js";
import { clock, h, number, say, useSimulatedTime } from "./dom.js";
import { named } from "./feed.js";
import { Requests } from "./requests.js";
import { Cascades, drawFaults, Instances, Overview, Placement } from "./views.js";

const SPEEDS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const WHOLE_S = 60; // that the whole recording plays in at first, about
const byId = (id) => document.getElementById(id);

/** One run: what was sent of it, taken in up to the moment that is shown. */
class Run {
  constructor({ name, interval_s: intervalS, facts, updates, stories, requests }) {
    Object.assign(this, { name, intervalS, facts, updates, stories, requests });
    [{ columns: this.columns, point_columns: this.pointColumns }] = updates;
    this.atMs = updates.map((update) => update.body.at_unix_ms);
    this.lastMs = this.atMs.at(-1);
    this.points = updates.map((update) => named(this.pointColumns, update.series.at(-1)));
    this.index = -1;
    this.rows = new Map();
  }

  /** The last moment that is not later. */
  indexAt(nowMs) {
    let low = 0, high = this.atMs.length - 1;
    while (low < high) {
      const middle = Math.ceil((low + high) / 2);
      if (this.atMs[middle] <= nowMs) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  stateAt(nowMs) {
    const index = this.indexAt(nowMs);
    if (index === this.index) return this.state;
    if (index < this.index) [this.index, this.rows] = [-1, new Map()];
    while (this.index < index) {
      const { gone, instances } = this.updates[++this.index];
      for (const name of gone) this.rows.delete(name);
      for (const row of instances) this.rows.set(row[0], row);
    }
    const instances = [...this.rows.values()].map((row) => named(this.columns, row)).sort((a, b) => (a.instance_id < b.instance_id ? -1 : 1));
    this.state = { body: this.updates[index].body, instances, series: this.points.slice(0, index + 1) };
    return this.state;
  }

  async find(id) {
    const story = this.stories[id];
    if (story) return story;
    throw new Error(`This recording keeps the stories of the ${number(Object.keys(this.stories).length)} requests that took longest, of ${number(this.requests)}; ${id} is not among them.`);
  }
}

/** A run with its views. */
class Pane {
  constructor(run) {
    this.run = run;
    this.views = {};
    this.faults = h("div", { class: "faults" });
    this.body = h("div", {});
    this.element = h("section", { class: "pane", "aria-label": `Run by ${run.name}` }, h("h2", { class: "run" }, run.name), this.faults, this.body);
    new MutationObserver(() => this.#nameRegions()).observe(this.body, { childList: true, subtree: true });
    this.makers = {
      overview: () => new Overview(), instances: () => new Instances(null), requests: () => new Requests(null, (id) => run.find(id)),
      placement: () => new Placement(null), cascades: () => new Cascades(null), autoscale: () => new Autoscale(null),
    };
  }

  show(name, argument) {
    this.views[name] ??= this.makers[name]();
    this.body.replaceChildren(this.views[name].element);
    this.views[name].show?.(argument);
  }

  /** The regions of two runs are told apart by their names, for who jumps from one to the next. */
  #nameRegions() {
    for (const region of this.body.querySelectorAll("section:not([data-run]), [role=region]:not([data-run])")) {
      region.dataset.run = this.run.name;
      const title = region.getAttribute("aria-label") ?? region.querySelector("h2").textContent;
      region.removeAttribute("aria-labelledby");
      region.setAttribute("aria-label", `${title}, ${this.run.name}`);
    }
  }

  update(name, nowMs) {
    const state = this.run.stateAt(nowMs);
    drawFaults(this.faults, state.body.faults);
    this.views[name].update(state);
  }
}

class Player {
  constructor({ title, runs }) {
    this.title = title;
    this.runs = runs.map((run) => new Run(run));
    this.firstMs = Math.min(...this.runs.map((run) => run.atMs[0]));
    this.lastMs = Math.max(...this.runs.map((run) => run.lastMs));
    this.nowMs = this.firstMs;
    this.panes = new Map();
    this.chosen = this.runs.slice(0, 2).map((_, index) => index);
    this.compare = new Compare(() => this.shownRuns());
    this.#makeBar();
  }

  shownRuns() {
    return this.chosen.map((index) => this.runs[index]);
  }

  #makeBar() {
    const stepMs = 1000 * Math.min(...this.runs.map((run) => run.intervalS));
    const lastS = (this.lastMs - this.firstMs) / 1000;
    const speed = SPEEDS.find((each) => each >= lastS / WHOLE_S) ?? SPEEDS.at(-1);
    this.play = h("button", { type: "button", class: "primary", onclick: () => this.toggle() }, "Play");
    this.slider = h("input", { type: "range", id: "moment", min: this.firstMs, max: this.lastMs, step: Math.max(1, Math.round(stepMs)), value: this.firstMs,
      oninput: () => this.seek(Number(this.slider.value)) });
    this.slider.value = this.firstMs;
    this.time = h("output", { for: "moment", "aria-live": "off" });
    this.speed = h("select", { id: "speed" }, ...SPEEDS.map((each) => h("option", { value: each, selected: each === speed }, `${each} ×`)));
    const choice = (id, label, place, none) => {
      const select = h("select", { id, onchange: () => this.#choose(place, select.value) },
        ...(none ? [h("option", { value: "" }, "nothing")] : []), ...this.runs.map((run, index) => h("option", { value: index, selected: this.chosen[place] === index }, run.name)));
      return h("span", {}, h("label", { for: id }, label), " ", select);
    };
    this.bar = h("section", { class: "player", "aria-label": "Replay" },
      this.play, h("label", { for: "moment" }, "Moment"), this.slider, this.time,
      h("span", {}, h("label", { for: "speed" }, "Speed"), " ", this.speed),
      ...(this.runs.length > 1 ? [choice("left", "Left", 0, false), choice("right", "Right", 1, true)] : []));
  }

  #choose(place, value) {
    if (place === 1 && value === "") this.chosen = [this.chosen[0]];
    else this.chosen[place] = Number(value);
    if (this.chosen[0] === this.chosen[1]) this.chosen.length = 1;
    byId("right").value = this.chosen.length > 1 ? this.chosen[1] : "";
    this.route();
  }

  toggle() {
    if (this.timer) this.pause();
    else {
      if (this.nowMs >= this.lastMs) this.nowMs = this.firstMs;
      say(this.play, "Pause");
      let before = performance.now();
      const tick = (at) => {
        this.timer = requestAnimationFrame(tick);
        const passedMs = (at - before) * Number(this.speed.value);
        before = at;
        this.seek(Math.min(this.lastMs, this.nowMs + Math.max(0, passedMs)));
        if (this.nowMs >= this.lastMs) this.pause();
      };
      this.timer = requestAnimationFrame(tick);
    }
  }

  pause() {
    cancelAnimationFrame(this.timer);
    this.timer = null;
    say(this.play, "Play");
  }

  /** To the next moment of the left run, or the one before. */
  step(direction) {
    const { atMs } = this.runs[this.chosen[0]];
    const index = this.runs[this.chosen[0]].indexAt(this.nowMs) + direction;
    this.seek(atMs[Math.max(0, Math.min(atMs.length - 1, index))]);
  }

  seek(nowMs) {
    this.nowMs = nowMs;
    this.draw();
  }

  route() {
    const [name, argument = ""] = location.hash.slice(1).split("/");
    const known = ["overview", "instances", "requests", "placement", "cascades", "autoscale", "compare"];
    this.shown = known.includes(name) ? name : this.runs.length > 1 ? "compare" : "overview";
    const content = byId("content");
    document.title = `${this.shown[0].toUpperCase()}${this.shown.slice(1)} – ${this.title} – Penstock`;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${this.shown}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    if (this.shown === "compare") content.replaceChildren(this.compare.element);
    else {
      const panes = this.chosen.map((index) => {
        if (!this.panes.has(index)) this.panes.set(index, new Pane(this.runs[index]));
        return this.panes.get(index);
      });
      content.replaceChildren(h("div", { class: panes.length > 1 ? "panes" : null }, ...panes.map((pane) => pane.element)));
      panes.forEach((pane) => pane.show(this.shown, decodeURIComponent(argument)));
    }
    this.drawn = null;
    this.draw();
  }

  /** With tenths of a second where moments are closer than seconds. */
  #clock(atMs) {
    const tenths = this.runs.some((run) => run.intervalS < 1) ? `.${Math.floor((atMs % 1000) / 100)}` : "";
    return clock(atMs) + tenths;
  }

  draw() {
    const began = performance.now();
    this.slider.value = this.nowMs;
    const text = `${this.#clock(this.nowMs)} of ${this.#clock(this.lastMs)}`;
    say(this.time, text);
    this.slider.setAttribute("aria-valuetext", text);
    const moment = this.shownRuns().map((run) => run.indexAt(this.nowMs)).join();
    if (this.drawn === moment) return;
    this.drawn = moment;
    if (this.shown === "compare") this.compare.update(this.nowMs);
    else this.chosen.forEach((index) => this.panes.get(index).update(this.shown, this.nowMs));
    performance.measure("penstock-frame", { start: began, end: performance.now() });
  }
}

/** The keys of a player, where nothing else has the focus that they mean something to. */
function keys(player) {
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || ![document.body, byId("content"), player.slider].includes(event.target)) return;
    const act = { " ": () => player.toggle(), ArrowLeft: () => player.step(-1), ArrowRight: () => player.step(1),
      Home: () => player.seek(player.firstMs), End: () => player.seek(player.lastMs) }[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

async function unpack() {
  const packed = Uint8Array.from(atob(byId("recording").textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

async function begin() {
  const recording = await unpack();
  if (recording.is_simulated) useSimulatedTime();
  const player = new Player(recording);
  const nav = document.querySelector("nav");
  nav.querySelector('a[href="#playground"]').remove();
  // Of one run it has the numbers at the moment beside those of the whole.
  nav.prepend(h("a", { href: "#compare" }, player.runs.length > 1 ? "Compare" : "Summary"));
  byId("key-button").remove();
  byId("faults").remove();
  byId("content").before(player.bar);
  const intervals = [...new Set(player.runs.map((run) => number(run.intervalS, 1)))].join(" or ");
  say(byId("live"), `recording of ${recording.title}: a moment every ${intervals} s`);
  byId("live").className = "ok";
  byId("theme-button").addEventListener("click", () => {
    setTheme(getComputedStyle(document.documentElement).colorScheme.trim() === "dark" ? "light" : "dark");
    player.drawn = null;
    player.draw();
  });
  addEventListener("hashchange", () => player.route());
  keys(player);
  player.route();
}

setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
begin().catch((error) => {
  byId("content").replaceChildren(h("p", { class: "bad" }, `This recording cannot be shown: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
});
