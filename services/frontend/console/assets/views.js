// The views: each makes its elements once, and writes into them what the state says. Without an `act` there is nothing to
// be done: a recording is shown.

import { Chart } from "./charts.js";
import { clock, h, ms, number, percent, redraw, say, section, unique } from "./dom.js";
import { Table } from "./table.js";

const text = (name) => ({ value: (row) => row[name], text: (row) => row[name] });
const count = (name, digits = 0) => ({ numeric: true, value: (row) => row[name], text: (row) => number(row[name], digits) });

/** Faults, the worst first; shown above every view. */
export function drawFaults(element, faults) {
  element.hidden = faults.length === 0;
  redraw(element, faults, () => [
    h("h2", { class: "hidden" }, "Faults"),
    h("ul", {}, ...faults.map((fault) => h("li", { class: fault.severity },
      h("strong", {}, `${fault.severity}: `), fault.what, fault.advice ? h("span", { class: "advice" }, ` — ${fault.advice}`) : null))),
  ]);
}

export class Overview {
  constructor() {
    this.tiles = h("dl", { class: "tiles" });
    this.charts = [
      new Chart("Requests ended per second", [{ label: "requests/s", value: (p) => p.requests_s }, { label: "failed/s", value: (p) => p.failed_s }], (v) => number(v, 1)),
      new Chart("Tokens per second", [{ label: "generated", value: (p) => p.generated_s }, { label: "prefilled", value: (p) => p.prefilled_s }], (v) => number(v)),
      new Chart("Time to first token (10 s)", [{ label: "p50", value: (p) => p.ttft_p50_ms }, { label: "p95", value: (p) => p.ttft_p95_ms }], ms),
      new Chart("Time per output token (10 s)", [{ label: "p50", value: (p) => p.tpot_p50_ms }, { label: "p95", value: (p) => p.tpot_p95_ms }], ms),
      new Chart("Requests at the instances", [{ label: "running", value: (p) => p.running }, { label: "waiting", value: (p) => p.queued }], (v) => number(v, 1)),
      new Chart("KV memory of running requests", [{ label: "used", value: (p) => p.kv_share }], percent),
    ];
    this.models = serviceTable("Service by model", "no request has ended yet: ask something in the playground");
    this.tenants = serviceTable("Service by API key", "no keys are asked for here, or none was used");
    this.events = new Table("Events", [
      { title: "at", text: (row) => clock(row.at_unix_ms) },
      { title: "what", text: (row) => row.what, cell: (td, row) => td.replaceChildren(h("span", { class: row.is_bad ? "bad" : null }, row.what)) },
    ], (row) => `${row.at_unix_ms} ${row.what}`, { empty: "nothing has come or gone while this frontend was watched" });
    this.objectives = h("p", { class: "note" });
    this.element = h("div", {},
      section("Now", this.tiles),
      section("Lately", h("div", { class: "charts" }, ...this.charts.map((each) => each.element))),
      section("Service by model", this.objectives, this.models.box),
      section("Service by API key", this.tenants.box),
      section("Events", this.events.box));
  }

  update({ body, series }) {
    const t = body.totals;
    redraw(this.tiles, [
      ["instances ready", `${t.ready} of ${t.instances}`],
      ["requests running", number(t.running)],
      ["queued at instances", number(t.queued)],
      ["waiting for an instance", number(t.waiting + t.admission_queue)],
      ["requests per second", number(t.requests_s, 1)],
      ["tokens per second", number(t.generated_s)],
      ["KV in use", t.kv_blocks ? percent(t.kv_used_blocks / t.kv_blocks) : "–"],
      ["prompt from caches", percent(t.cached_share)],
      ["policy", body.policy ? body.policy.name : "unknown"],
    ], (tiles) => tiles.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    this.charts.forEach((chart) => chart.update(series));
    say(this.objectives, `Over the last ${number(body.window_s)} s. “Kept” is the share of requests with the first token within ${ms(body.slo_ttft_ms)} and ${ms(body.slo_tpot_ms)} per token; a failed one has not.`);
    this.models.update(body.models);
    this.tenants.update(body.tenants);
    this.events.update(body.events);
  }
}

function serviceTable(caption, empty) {
  const p = (measure, name) => ({ numeric: true, value: (row) => row[measure][name], text: (row) => ms(row[measure][name]) });
  return new Table(caption, [
    { title: "name", ...text("name") },
    { title: "requests", ...count("requests") },
    { title: "per s", ...count("requests_s", 2) },
    { title: "tokens/s", ...count("generated_s", 1) },
    { title: "kept", numeric: true, value: (row) => row.attained, text: (row) => percent(row.attained) },
    { title: "TTFT p50", ...p("ttft_ms", "p50") }, { title: "p95", ...p("ttft_ms", "p95") }, { title: "p99", ...p("ttft_ms", "p99") },
    { title: "TPOT p50", ...p("tpot_ms", "p50") }, { title: "p95", ...p("tpot_ms", "p95") }, { title: "p99", ...p("tpot_ms", "p99") },
    { title: "end to end p95", ...p("e2e_ms", "p95") },
    { title: "cached", numeric: true, value: (row) => row.cached_share, text: (row) => percent(row.cached_share) },
    { title: "failed", ...count("failed") }, { title: "refused", ...count("refused") },
    { title: "moved", ...count("moves") }, { title: "recovered", ...count("recoveries") },
  ], (row) => row.name, { empty });
}

export class Instances {
  constructor(act) {
    const filterId = unique("filter");
    this.filter = h("input", { type: "search", id: filterId, placeholder: "name, model, state …", oninput: () => this.#show() });
    this.shown = h("p", { class: "note", role: "status" });
    this.table = new Table("Instances", [
      { title: "instance", ...text("instance_id") },
      { title: "state", value: (row) => row.state, text: (row) => row.state, cell: (td, row) => td.replaceChildren(h("span", { class: `state ${row.state === "ready" ? "ready" : row.state === "draining" || row.state === "starting" ? "note" : "bad"}` }, row.state)) },
      { title: "running", ...count("running") },
      { title: "decoding", ...count("decoding") },
      { title: "queued", ...count("queued") },
      { title: "to prefill", hint: "prompt tokens that are still to be computed", ...count("queued_prefill_tokens") },
      { title: "KV of the GPU", numeric: true, hint: "used by running requests / held in the prefix cache / all, in blocks",
        value: (row) => (row.kv_blocks > 0 ? row.kv_used_blocks / row.kv_blocks : -1),
        text: (row) => `${number(row.kv_used_blocks)} / ${number(row.kv_cached_blocks)} / ${number(row.kv_blocks)}`, cell: kvCell },
      { title: "KV of the host", numeric: true, hint: "blocks that it could load from the memory of its host", ...count("host_blocks") },
      { title: "hits: engine / host / peers", numeric: true, hint: "prompt tokens found in the engine's prefix cache, loaded from the host, and pulled from other instances, over its life",
        value: (row) => row.engine_hit_tokens + row.host_hit_tokens + row.pulled_tokens, text: (row) => `${number(row.engine_hit_tokens)} / ${number(row.host_hit_tokens)} / ${number(row.pulled_tokens)}` },
      { title: "cached", hint: "share of prompt tokens found in the prefix cache", numeric: true, value: (row) => row.cached_share, text: (row) => percent(row.cached_share) },
      { title: "tokens/s", ...count("generated_s") },
      { title: "prefill/s", ...count("prefilled_s") },
      { title: "per token", numeric: true, value: (row) => row.token_interval_ms, text: (row) => ms(row.token_interval_ms || null) },
      { title: "model", ...text("model") },
      { title: "phase", ...text("phase") },
      { title: "stage", ...text("stage") },
      { title: "pool", ...text("pool") },
      { title: "engine", ...text("engine") },
      { title: "preempted", ...count("preemptions") },
      { title: "heard", numeric: true, hint: "age of its last load report", value: (row) => row.load_age_ms, text: (row) => (row.load_age_ms < 0 ? "–" : row.load_age_ms < 500 ? "now" : `${number(row.load_age_ms / 1000, 1)} s ago`) },
      act && { title: "actions", text: (row) => row.instance_id, cell: (td, row) => td.replaceChildren(
        h("button", { type: "button", "aria-label": `Drain ${row.instance_id}`, onclick: () => act({ action: "drain", instance: row.instance_id }) }, "Drain"), " ",
        h("button", { type: "button", "aria-label": `Restart ${row.instance_id}`, onclick: () => act({ action: "restart", role: "worker", member: row.instance_id }) }, "Restart")) },
    ].filter(Boolean), (row) => row.instance_id, { tall: true, sortBy: 0, empty: "no instance: penstock up, or penstock serve worker" });
    this.members = new Table("Other processes", [
      { title: "process", value: (row) => `${row.role} ${row.member_id}`, text: (row) => `${row.role} ${row.member_id}` },
      { title: "health", text: (row) => row.health, cell: (td, row) => td.replaceChildren(h("span", { class: `state ${row.health === "serving" ? "ready" : "bad"}` }, row.health)) },
      { title: "leads", text: (row) => row.leads.join(", ") },
      { title: "does", text: (row) => row.detail },
      { title: "gRPC", text: (row) => row.address },
      act && { title: "actions", text: (row) => row.member_id, cell: (td, row) => td.replaceChildren(
        h("button", { type: "button", "aria-label": `Restart ${row.role} ${row.member_id}`, onclick: () => act({ action: "restart", role: row.role, member: row.member_id }) }, "Restart")) },
    ].filter(Boolean), (row) => `${row.role}/${row.member_id}`);
    this.stages = new Table("Stages", [
      { title: "model", ...text("model") }, { title: "stage", ...count("number") },
      { title: "tokens", text: (row) => (row.number ? `${row.first_tokens} to ${row.last_tokens || "any"}` : "–") },
      { title: "instances", ...count("instances") }, { title: "", text: (row) => row.obstacle },
    ], (row) => `${row.model} ${row.number}`, { empty: "stages are off: penstock stages on" });
    this.element = h("div", {},
      section("Instances", h("p", {}, h("label", { for: filterId }, "Filter "), this.filter), this.shown, this.table.box),
      section("Other processes", this.members.box), section("Stages by length", this.stages.box));
    this.rows = [];
  }

  update({ body, instances }) {
    this.rows = instances;
    this.#show();
    this.members.update(body.members);
    this.stages.update(body.stages);
  }

  #show() {
    const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = words.length === 0 ? this.rows : this.rows.filter((row) => {
      const all = `${row.instance_id} ${row.model} ${row.state} ${row.phase} ${row.pool} ${row.engine}`.toLowerCase();
      return words.every((word) => all.includes(word));
    });
    say(this.shown, found.length === this.rows.length ? `${number(found.length)} instances` : `${number(found.length)} of ${number(this.rows.length)} instances`);
    this.table.update(found);
  }
}

function kvCell(td, row) {
  const share = (blocks) => (row.kv_blocks > 0 ? Math.min(100, (100 * Math.max(0, blocks)) / row.kv_blocks) : 0);
  const used = h("span", { class: "used" }), cached = h("span", { class: "cached" });
  used.style.width = `${share(row.kv_used_blocks)}%`;
  cached.style.width = `${Math.max(0, share(row.kv_cached_blocks) - share(row.kv_used_blocks))}%`;
  td.replaceChildren(h("span", { class: "bar", "aria-hidden": "true" }, used, cached),
    ` ${number(row.kv_used_blocks)} / ${number(row.kv_cached_blocks)} / ${number(row.kv_blocks)}`);
}

export class Placement {
  constructor(act) {
    // Each by itself: what somebody has chosen in one of them stays when another one changes.
    [this.policy, this.parameters, this.rescheduler] = [h("div", {}), h("div", {}), h("div", {})];
    this.act = act;
    this.list = h("div", {});
    this.moves = new Table("Moves", [
      { title: "at", text: (row) => clock(row.at_unix_ms) },
      { title: "request", text: (row) => row.request_id, cell: storyLink("request_id") },
      { title: "from", ...text("source") }, { title: "to", ...text("target") },
      { title: "outcome", text: (row) => row.outcome.replace("_", " ") },
      { title: "took", numeric: true, text: (row) => ms(row.duration_ms) },
      { title: "paused", numeric: true, text: (row) => ms(row.paused_ms) },
      { title: "why", text: (row) => (row.message ? `${row.message}; ordered because ${row.reason}` : row.reason) },
    ], (row) => `${row.request_id} ${row.at_unix_ms}`, { empty: "the rescheduler has moved nothing lately" });
    this.saved = h("p", { class: "note" });
    this.element = h("div", {}, section("Policy", this.policy, this.parameters, this.rescheduler), section("Moves", this.saved, this.moves.box),
      section("Latest placements", h("p", { class: "note" }, "The lowest score wins. Parts of a score that end in _ms are milliseconds."), this.list));
  }

  update({ body }) {
    const { policy } = body;
    redraw(this.policy, policy && [policy.available, policy.name], (known) =>
      [known ? this.#choice("policy", "Placement policy", ...known, (name) => ({ action: "policy", name })) : "No scheduler says what it places by."]);
    redraw(this.parameters, policy?.parameters ?? {}, (parameters) => {
      const words = Object.entries(parameters).map(([name, value]) => `${name} = ${number(value, 4)}`).join(", ");
      return words ? [h("p", { class: "note" }, words)] : [];
    });
    redraw(this.rescheduler, policy?.rescheduler ? [policy.rescheduler_available, policy.rescheduler] : null, (known) =>
      (known ? [this.#choice("rescheduler", "Rescheduler", ...known, (mode) => ({ action: "rescheduler", mode }))] : []));
    if (policy) {
      const { moved_total: moved, stayed_total: stayed, paused_ms_mean: paused } = body.policy;
      const pause = paused == null ? "" : ` Those below paused their requests for ${ms(paused)} on average, instead of computing their whole contexts again.`;
      say(this.saved, `${number(moved)} moved and ${number(stayed)} stayed since the schedulers started.${pause}`);
    }
    this.moves.update(body.moves);
    redraw(this.list, body.placements, (placements) => (placements.length ? placements.map(placementArticle) : [h("p", { class: "empty" }, "nothing was placed yet")]));
  }

  #choice(id, label, names, current, action) {
    if (!this.act) return h("p", {}, `${label}: `, h("strong", {}, current));
    const select = h("select", { id, "data-key": id }, ...names.map((name) => h("option", { value: name, selected: name === current }, name)));
    const button = h("button", { type: "button", "data-key": `${id}-set`, onclick: () => this.act(action(select.value)) }, "Switch");
    return h("p", {}, h("label", { for: id }, label), " ", select, " ", button);
  }
}

export function storyLink(name) {
  return (td, row) => td.replaceChildren(h("a", { href: `#requests/${encodeURIComponent(row[name])}` }, row[name]));
}

/** One placement with its options; used in a request's story, too. */
export function placementArticle(placement) {
  const parts = [...new Set(placement.options.flatMap((option) => Object.keys(option.parts)))];
  // Of the sum; `if_...` says what another way would have cost.
  const times = parts.filter((part) => part.endsWith("_ms") && !part.startsWith("if_"));
  const longest = Math.max(1, ...placement.options.map((option) => times.reduce((sum, part) => sum + Math.max(0, option.parts[part] ?? 0), 0)));
  const bar = (option) => h("span", { class: "bar wide", "aria-hidden": "true" }, ...times.map((part, index) => {
    const piece = h("span", { class: `part-${(index % 4) + 1}` });
    piece.style.width = `${(100 * Math.max(0, option.parts[part] ?? 0)) / longest}%`;
    return piece;
  }));
  const excluded = placement.excluded ? `, ${placement.excluded} of them out of the question` : "";
  return h("article", { class: "placement" },
    h("h3", {}, `${clock(placement.at_unix_ms)}: `, h("a", { href: `#requests/${encodeURIComponent(placement.request_id)}`, "data-key": placement.request_id }, placement.request_id), ` to ${placement.chosen}`),
    h("p", { class: "note" }, `${placement.policy} at ${placement.scheduler}, ${number(placement.prompt_tokens)} prompt tokens, ${number(placement.instances)} instances${excluded}. ${placement.rule}.`),
    placement.pull ? h("p", { class: "note" }, `${placement.chosen} ${placement.pull}.`) : null,
    placement.decoded_by ? h("p", { class: "note" }, `Decoded by ${placement.decoded_by}: ${placement.decode_rule}`) : null,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Options for ${placement.request_id}` }, h("table", {},
      h("caption", { class: "hidden" }, `Options for ${placement.request_id}`),
      h("thead", {}, h("tr", {}, ...["instance", "score", ...(times.length ? ["milliseconds"] : []), ...parts, "outcome"].map((title) => h("th", { scope: "col" },
        times.includes(title) ? h("span", { class: `dot part-${(times.indexOf(title) % 4) + 1}`, "aria-hidden": "true" }) : null, title)))),
      h("tbody", {}, ...placement.options.map((option) => h("tr", { class: option.is_chosen ? "chosen" : null },
        h("th", { scope: "row" }, option.instance_id),
        h("td", { class: "number" }, option.excluded ? "–" : number(option.score, 2)),
        times.length ? h("td", {}, bar(option)) : null,
        ...parts.map((part) => h("td", { class: "number" }, number(option.parts[part] ?? null, 1))),
        h("td", {}, option.is_chosen ? "chosen" : option.excluded)))))));
}

export class Cascades {
  constructor(act) {
    this.act = act;
    this.cascades = h("div", {});
    this.plans = h("div", {});
    this.element = h("div", {}, section("Cascades", this.cascades), section("Plans", this.plans));
  }

  update({ body }) {
    redraw(this.cascades, body.cascades, (rows) => (rows.length ? rows.map(cascadeArticle) : [h("p", { class: "empty" }, "no cascade is configured: penstock cascade set")]));
    redraw(this.plans, [body.plans, body.cascades.map((row) => row.name)], ([rows, names]) => [
      ...(rows.length ? rows.map((row) => this.#plan(row)) : [h("p", { class: "empty" }, "no cascade has a goal or a plan")]),
      names.length && this.act ? this.#goal(names) : null,
    ].filter(Boolean));
  }

  #plan(plan) {
    const replicas = Object.entries(plan.replicas).map(([model, replicaCount]) => `${replicaCount} × ${model}`).join(", ");
    const goal = Object.entries(plan.goal).map(([name, value]) => `${name} ${Array.isArray(value) ? value.join(" ") : value}`).join(", ");
    return h("article", {},
      h("h3", {}, plan.cascade),
      h("dl", { class: "facts" },
        h("dt", {}, "goal"), h("dd", {}, goal || "none"),
        h("dt", {}, "plan in force"), h("dd", {}, plan.revision ? `revision ${plan.revision}: ${replicas} on ${plan.gpus} GPUs, quality ${number(plan.quality, 1)}, ${number(plan.latency_s, 2)} s` : "none"),
        ...(plan.promise ? [h("dt", {}, "quality by labels"), h("dd", {}, plan.promise)] : []),
        h("dt", {}, "next"), h("dd", {}, plan.verdict || "waits for a sampled workload"),
        h("dt", {}, "instances"), h("dd", {}, plan.deployment.length ? plan.deployment.join("; ") : "nothing is missing")));
  }

  #goal(names) {
    const field = (id, label, attributes) => [h("label", { for: id }, label), h("input", { id, "data-key": id, ...attributes })];
    const cascade = h("select", { id: "goal-cascade", "data-key": "goal-cascade" }, ...names.map((name) => h("option", {}, name)));
    return h("form", { class: "grid", onsubmit: (event) => {
      event.preventDefault();
      const value = (id) => event.target.querySelector(`#${id}`).value.trim();
      const goal = { action: "goal", cascade: cascade.value, gpus: Number(value("goal-gpus")), tiers: value("goal-tiers").split(/[\s]+/).filter(Boolean) };
      if (value("goal-quality")) goal.quality = Number(value("goal-quality"));
      if (value("goal-latency")) goal.latency_s = Number(value("goal-latency"));
      this.act(goal);
    } },
    h("h3", {}, "Set a goal"),
    h("label", { for: "goal-cascade" }, "Cascade"), cascade,
    ...field("goal-gpus", "GPUs", { type: "number", min: "1", max: "4096", required: true }),
    ...field("goal-tiers", "Tiers, as MODEL@DEVICE, with spaces between", { required: true }),
    ...field("goal-quality", "Quality (0 to 100)", { type: "number", min: "0", max: "100", step: "any" }),
    ...field("goal-latency", "or latency in s", { type: "number", min: "0", step: "any" }),
    h("button", { type: "submit", "data-key": "goal-set" }, "Set the goal"));
  }
}

function cascadeArticle(row) {
  const pair = (name, promised, achieved) => [h("dt", {}, name), h("dd", {}, `${achieved} achieved, ${promised} promised`)];
  const cells = (tier) => [
    h("th", { scope: "row" }, tier.model),
    ...[tier.threshold == null ? "always" : tier.threshold > 100 ? "never" : `from ${number(tier.threshold, 1)}`,
      percent(tier.share), percent(tier.planned_share), number(tier.answers), number(tier.mean_score, 1),
      tier.p95_s == null ? "–" : `${number(tier.p95_s, 2)} s`, tier.planned_p95_s == null ? "–" : `${number(tier.planned_p95_s, 2)} s`,
    ].map((value) => h("td", { class: "number" }, value)),
  ];
  const titles = ["tier", "accepted", "share of requests", "planned", "answers", "mean score", "p95", "planned p95"];
  return h("article", {}, h("h3", {}, row.name),
    h("dl", { class: "facts" },
      ...pair("quality", number(row.promised_quality, 1), number(row.achieved_quality, 1)),
      ...pair("p95", row.promised_p95_s == null ? "–" : `${number(row.promised_p95_s, 2)} s`, row.achieved_p95_s == null ? "–" : `${number(row.achieved_p95_s, 2)} s`),
      h("dt", {}, "answers"), h("dd", {}, `${number(row.answered)} in the window, ${number(row.judged)} of them judged by ${row.judges.join(", ")}`),
      h("dt", {}, "thresholds"), h("dd", {}, `from ${row.thresholds_from}`)),
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Tiers of ${row.name}` }, h("table", {},
      h("caption", { class: "hidden" }, `Tiers of ${row.name}`),
      h("thead", {}, h("tr", {}, ...titles.map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, ...row.tiers.map((tier) => h("tr", {}, ...cells(tier)))))));
}
