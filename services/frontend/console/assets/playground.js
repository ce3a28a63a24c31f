// Asks the public API, as any client would, and shows what the mesh said of the answer.

import { h, ms, number, say, section } from "./dom.js";
import { ask, events } from "./feed.js";

const FOLLOW_PX = 300;

export class Playground {
  constructor() {
    this.messages = [];
    this.model = h("select", { id: "model" });
    this.prompt = h("textarea", { id: "prompt", rows: "3", required: true, onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    } });
    this.limit = h("input", { id: "max-tokens", type: "number", min: "1", max: "100000", value: "256" });
    this.send = h("button", { type: "submit" }, "Send");
    this.stop = h("button", { type: "button", disabled: true, onclick: () => this.controller?.abort() }, "Stop");
    const anew = h("button", { type: "button", onclick: () => this.#anew() }, "New conversation");
    this.status = h("p", { role: "status", class: "note" });
    this.log = h("div", { class: "conversation", role: "log", "aria-label": "Conversation", "aria-live": "off", tabindex: "0" });
    this.form = h("form", { class: "grid", onsubmit: (event) => { event.preventDefault(); this.#ask(); } },
      h("label", { for: "model" }, "Model"), this.model,
      h("label", { for: "max-tokens" }, "Most tokens"), this.limit,
      h("label", { for: "prompt" }, "Message"), this.prompt,
      h("p", { class: "buttons" }, this.send, " ", this.stop, " ", anew));
    this.element = h("div", {}, section("Playground",
      h("p", { class: "note" }, "POST /v1/chat/completions, streamed. The whole conversation is sent each time: see how much of it the mesh has cached. Ctrl+Enter sends."),
      this.log, this.status, this.form));
  }

  update() {}

  /** The models that can be asked now. */
  async show() {
    try {
      const { data } = await (await ask("v1/models")).json();
      const chosen = this.model.value;
      this.model.replaceChildren(...data.map((each) => h("option", { value: each.id, selected: each.id === chosen }, each.id)));
      if (data.length === 0) say(this.status, "No model is served now.");
    } catch (error) {
      say(this.status, error.message);
    }
  }

  #anew() {
    this.controller?.abort();
    this.messages = [];
    this.log.replaceChildren();
    say(this.status, "");
  }

  async #ask() {
    const content = this.prompt.value.trim();
    if (!content || this.controller) return;
    this.messages.push({ role: "user", content });
    this.prompt.value = "";
    const answer = h("p", { class: "answer" }), facts = h("dl", { class: "facts" });
    this.log.append(h("article", { class: "turn" }, h("p", { class: "question" }, content), answer, facts));
    this.controller = new AbortController();
    [this.send.disabled, this.stop.disabled] = [true, false];
    say(this.status, "asking");
    const told = { began: performance.now(), text: "" };
    try {
      await this.#stream(told, answer);
      say(this.status, "answered");
    } catch (error) {
      say(this.status, error.name === "AbortError" ? "stopped" : error.message);
      if (error.name !== "AbortError") answer.after(h("p", { class: "bad" }, error.message));
    }
    this.#facts(facts, told);
    this.messages.push({ role: "assistant", content: told.text });
    this.controller = null;
    [this.send.disabled, this.stop.disabled] = [false, true];
  }

  async #stream(told, answer) {
    const body = { model: this.model.value, messages: this.messages, max_tokens: Number(this.limit.value), stream: true, stream_options: { include_usage: true } };
    const response = await ask("v1/chat/completions", { method: "POST", signal: this.controller.signal, headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
    told.headers = response.headers;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices?.[0]?.delta?.content ?? "";
      if (piece) {
        told.first ??= performance.now();
        told.text += piece;
        answer.append(piece);
        this.#follow();
      }
      told.usage = chunk.usage ?? told.usage;
      told.cascade = chunk.penstock ?? told.cascade;
    }
    told.ended = performance.now();
  }

  /** Keep the end in sight, unless somebody reads further up. */
  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < FOLLOW_PX) this.log.scrollTop = scrollHeight;
  }

  #facts(facts, told) {
    const header = (name) => told.headers?.get(`x-penstock-${name}`);
    const id = header("request-id"), usage = told.usage;
    const rate = usage && told.first && usage.completion_tokens > 1 ? (1000 * (usage.completion_tokens - 1)) / (told.ended - told.first) : null;
    const shown = [
      ["tier", header("tier") ?? told.cascade?.tier], ["scores", header("scores")],
      ["instance", header("instance")], ["policy", header("policy")],
      ["cached tokens", usage ? `${number(usage.prompt_tokens_details?.cached_tokens ?? 0)} of ${number(usage.prompt_tokens)}` : null],
      ["tokens", usage ? number(usage.completion_tokens) : null],
      ["first token", told.first ? ms(told.first - told.began) : null],
      ["tokens/s", rate ? number(rate, 1) : null],
    ].filter(([, value]) => value);
    facts.replaceChildren(...shown.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
    this.#follow();
    if (id) facts.append(h("dt", {}, "request"), h("dd", {}, h("a", { href: `#requests/${encodeURIComponent(id)}` }, id)));
  }
}
