// Two runs of one trace, beside each other: their numbers at this moment, their courses, and what they came to.

import { Chart } from "./charts.js";
import { h, ms, number, percent, redraw, section } from "./dom.js";

const COURSES = [
  ["Time to first token, p95 (10 s)", (p) => p.ttft_p95_ms, ms],
  ["Time per output token, p95 (10 s)", (p) => p.tpot_p95_ms, ms],
  ["Requests at the instances", (p) => p.running + p.queued, (v) => number(v)],
  ["Requests ended per second", (p) => p.requests_s, (v) => number(v, 1)],
  ["Tokens generated per second", (p) => p.generated_s, (v) => number(v)],
  ["KV memory of running requests", (p) => p.kv_share, percent],
];

const MEASURES = [
  ["TTFT p50", (row) => ms(row.ttft_ms.p50)], ["TTFT p95", (row) => ms(row.ttft_ms.p95)], ["TTFT p99", (row) => ms(row.ttft_ms.p99)],
  ["TPOT p50", (row) => ms(row.tpot_ms.p50)], ["TPOT p95", (row) => ms(row.tpot_ms.p95)],
  ["end to end p95", (row) => ms(row.e2e_ms.p95)], ["kept the objectives", (row) => percent(row.attained)],
  ["prompt from caches", (row) => percent(row.cached_share)], ["failed", (row) => number(row.failed)],
];

export class Compare {
  /** `runs()`: those that are shown, each with name, facts, points and indexAt(ms). */
  constructor(runs) {
    this.runs = runs;
    this.now = h("div", {});
    this.courses = h("div", { class: "charts" });
    this.facts = h("div", {});
    this.element = h("div", {}, section("At this moment", this.now), section("Until now", this.courses), section("The whole runs", this.facts));
  }

  update(nowMs) {
    const runs = this.runs(), names = runs.map((run) => run.name);
    this.#drawCourses(runs, names, nowMs);
    const states = runs.map((run) => run.stateAt(nowMs).body);
    const rows = [
      ["requests running", ...states.map((body) => number(body.totals.running))],
      ["queued at instances", ...states.map((body) => number(body.totals.queued))],
      ["moved so far", ...states.map((body) => number(body.policy?.moved_total ?? 0))],
      ...MEASURES.map(([name, text]) => [`${name}, last ${number(states[0].window_s)} s`, ...states.map((body) => (body.models.length ? text(body.models[0]) : "–"))]),
    ];
    redraw(this.now, [names, rows], () => [table("Numbers at this moment", names, rows)]);
    const titles = [...new Set(runs.flatMap((run) => Object.keys(run.facts)))];
    redraw(this.facts, [names, titles], () => [table("Numbers of the whole runs", names, titles.map((title) => [title, ...runs.map((run) => run.facts[title] ?? "–")]))]);
  }

  #drawCourses(runs, names, nowMs) {
    const key = JSON.stringify(names);
    if (this.drawn !== key) {
      this.drawn = key;
      this.charts = COURSES.map(([title, value, format]) =>
        new Chart(title, runs.map((run, index) => ({ label: run.name, value: (point) => (point[index] ? value(point[index]) : null) })), format));
      this.courses.replaceChildren(...this.charts.map((chart) => chart.element));
    }
    const times = [...new Set(runs.flatMap((run) => run.atMs))].filter((at) => at <= nowMs).sort((a, b) => a - b);
    const points = times.map((at) => ({ at_unix_ms: at, ...runs.map((run) => (at > run.lastMs ? null : run.points[run.indexAt(at)])) }));
    this.charts.forEach((chart) => chart.update(points));
  }
}

function table(caption, names, rows) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, h("table", {},
    h("caption", { class: "hidden" }, caption),
    h("thead", {}, h("tr", {}, h("td", {}), ...names.map((name) => h("th", { scope: "col", class: "number" }, name)))),
    h("tbody", {}, ...rows.map(([name, ...values]) => h("tr", {}, h("th", { scope: "row" }, name), ...values.map((value) => h("td", { class: "number" }, value)))))));
}
