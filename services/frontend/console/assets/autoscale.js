// Models that are scaled: what their load needs, what they have, why, and what comes next.

import { h, number, percent, redraw, section, unique } from "./dom.js";

// As the record has them, in its order: name, label, attributes of the field.
const MILLISECONDS = { type: "number", min: "0", step: "any" }, COUNT = { type: "number", step: "1" };
const FIELDS = [
  ["ttft_ms", "Time to first token, at most (ms)", MILLISECONDS],
  ["tpot_ms", "Time per output token, at most (ms)", MILLISECONDS],
  ["e2e_ms", "End to end, at most (ms)", MILLISECONDS],
  ["share", "Share of requests within that", { type: "number", min: "0.5", max: "0.9999", step: "any", placeholder: "0.99" }],
  ["minimum", "Replicas at least", { ...COUNT, min: "0", max: "1024", placeholder: "1" }],
  ["maximum", "Replicas at most", { ...COUNT, min: "1", max: "1024", placeholder: "8" }],
];
const RARE = [
  ["price_per_hour", "Price of a GPU per hour", { type: "number", min: "0", step: "any", placeholder: "0" }],
  ["budget_per_hour", "Budget of all replicas per hour", { type: "number", min: "0", step: "any", placeholder: "no bound" }],
  ["gpus", "GPUs of a replica", { ...COUNT, min: "1", placeholder: "1" }],
  ["cold_start_s", "Seconds from the order until a replica serves", { type: "number", min: "0", step: "any", placeholder: "as measured" }],
  ["capacity_per_s", "Requests per second that a replica sustains", { type: "number", min: "0", step: "any", placeholder: "as seen" }],
  ["interval_s", "Seconds between two decisions", { type: "number", min: "0", step: "any", placeholder: "60" }],
  ["settle_s", "Seconds until a replica that is not needed goes", { type: "number", min: "0", step: "any", placeholder: "300" }],
  ["idle_s", "With at least 0: seconds without a request until none is left", { type: "number", min: "0", step: "any", placeholder: "600" }],
  ["quantile", "Quantile of the forecast's error that is provided for", { type: "number", min: "0.5", max: "0.9999", step: "any", placeholder: "0.9" }],
];

export class Autoscale {
  constructor(act) {
    this.act = act;
    this.models = h("div", {});
    this.element = h("div", {}, section("Models that follow their load", this.models), act && this.#form());
  }

  update({ body }) {
    const scales = body.scales ?? []; // recordings of former releases have none
    redraw(this.models, scales, (rows) => (rows.length ? rows.map((row) => this.#model(row))
      : [h("p", { class: "empty" }, "no model is scaled: penstock autoscale set MODEL --slo-ttft-ms 1000")]));
    if (this.act) {
      const names = [...new Set([...scales.map((row) => row.model), ...body.models.map((row) => row.name)])];
      redraw(this.names, names, (all) => all.map((name) => h("option", { value: name })));
    }
  }

  #model(row) {
    const fact = (name, ...said) => [h("dt", {}, name), h("dd", {}, ...said)];
    const error = row.predictor ? `, by “${row.predictor}”, which was off by ${percent(row.forecast_error)}` : "";
    const known = !row.decided ? [] : [
      ...fact("replicas", `${number(row.serving)} serve, ${number(row.wanted)} ${row.dry_run ? "would be wanted (dry run)" : "wanted"}`),
      ...(row.refused ? fact("not as wanted", h("span", { class: "bad" }, row.refused)) : []),
      ...fact("within the SLO", row.kept_share == null ? "no request ended in the last interval" : percent(row.kept_share)),
      ...fact("comes", `${number(row.rate_per_s, 2)} requests/s, ${number(row.waiting)} wait`),
      ...fact("forecast", `${number(row.expected_per_s, 2)} requests/s, up to ${number(row.upper_per_s, 2)}${error}`),
      ...fact("a replica sustains", row.capacity_per_s ? `${number(row.capacity_per_s, 2)} requests/s` : "not known yet"),
      ...(row.cost ? fact("costs", row.cost) : []),
      ...fact("why", row.why),
    ];
    const name = `scale-${row.model}`;
    return h("article", { "aria-label": `Scale of ${row.model}` },
      h("h3", {}, row.model),
      h("dl", { class: "facts" },
        ...fact("SLO", row.slo), ...fact("bounds", `${number(row.minimum)} to ${number(row.maximum)} replicas`), ...known, ...fact("next", row.next)),
      this.act ? h("p", { class: "buttons" },
        h("button", { type: "button", "data-key": `${name}-edit`, "aria-label": `Change the scale of ${row.model}`, onclick: () => this.#fill(row) }, "Change"), " ",
        h("button", { type: "button", "data-key": `${name}-remove`, "aria-label": `Scale ${row.model} no more`, onclick: () => this.act({ action: "autoscale_remove", model: row.model }) }, "Scale no more")) : null);
  }

  #form() {
    const listId = unique("scale-models");
    this.names = h("datalist", { id: listId });
    this.inputs = {};
    const field = (name, label, attributes) => {
      const id = unique(`scale-${name.replaceAll("_", "-")}`);
      this.inputs[name] = h("input", { id, ...attributes });
      return [h("label", { for: id }, label), this.inputs[name]];
    };
    this.form = h("form", { class: "grid", onsubmit: (event) => { event.preventDefault(); this.act({ action: "autoscale", policy: this.#policy() }); } },
      ...field("model", "Model", { required: true, list: listId, autocomplete: "off" }), this.names,
      ...FIELDS.flatMap((each) => field(...each)),
      h("details", {}, h("summary", {}, "More"), h("div", { class: "grid" }, ...RARE.flatMap((each) => field(...each)))),
      ...field("dry_run", "Decide and show only (dry run)", { type: "checkbox" }),
      h("div", { class: "buttons" }, h("button", { type: "submit" }, "Scale it")));
    return section("Scale a model", h("p", { class: "note" }, "One of the three limits is needed. What is left empty is as the field shows."), this.form);
  }

  #fill(row) {
    this.form.reset();
    this.kept = row.policy; // what has no field in the form stays as it is
    for (const [name, input] of Object.entries(this.inputs)) {
      if (input.type === "checkbox") input.checked = Boolean(row.policy[name]);
      else input.value = row.policy[name] ?? "";
    }
    this.form.querySelector("details").open = RARE.some(([name]) => row.policy[name] != null);
    this.inputs.model.focus();
  }

  #policy() {
    const policy = { model: this.inputs.model.value.trim() };
    for (const [name] of [...FIELDS, ...RARE]) {
      if (this.inputs[name].value !== "") policy[name] = Number(this.inputs[name].value);
    }
    if (this.inputs.dry_run.checked) policy.dry_run = true;
    if (this.kept?.kinds && this.kept.model === policy.model) policy.kinds = this.kept.kinds;
    return policy;
  }
}
