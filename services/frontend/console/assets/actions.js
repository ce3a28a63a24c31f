// What operators do: said in words, shown as the command that does the same, and done only when confirmed.

import { h, say } from "./dom.js";
import { ask } from "./feed.js";

const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
const typed = (...words) => ["penstock", ...words].map(quoted).join(" ");

const SCALE_OPTIONS = { ttft_ms: "--slo-ttft-ms", tpot_ms: "--slo-tpot-ms", e2e_ms: "--slo-e2e-ms", capacity_per_s: "--capacity" };

const WORDS = {
  policy: ({ name }) => [`Place new requests by ${name}; those that run stay where they are.`, typed("policy", name)],
  rescheduler: ({ mode }) => [`Switch the rescheduler to ${mode}.`, typed("rescheduler", mode)],
  drain: ({ instance }) => [`Move everything away from ${instance}, then end it for good: penstock up does not start it again.`, typed("drain", instance)],
  restart: ({ role, member }) => [`Drain ${role} ${member}, end its process and have it started again.`, typed("restart", member, "--role", role)],
  migrate: ({ request, to }) => [`Move ${request} to ${to} while it runs.`, typed("migrate", request, "--to", to)],
  goal: ({ cascade, gpus, tiers, quality, latency_s: latency }) => [`Plan ${cascade} anew from the next workload on.`,
    typed("plan", "goal", cascade, "--gpus", String(gpus), ...tiers.flatMap((tier) => ["--tier", tier]),
      ...(quality == null ? [] : ["--quality", String(quality)]), ...(latency == null ? [] : ["--latency-s", String(latency)]))],
  autoscale: ({ policy: { model, ...rest } }) => [`Scale ${model} so from now on; what was set for it before is replaced.`,
    typed("autoscale", "set", model, ...Object.entries(rest).flatMap(([name, value]) => {
      const option = SCALE_OPTIONS[name] ?? `--${name.replaceAll("_", "-")}`;
      return value === true ? [option] : [option, String(value)];
    }))],
  autoscale_remove: ({ model }) => [`Scale ${model} no more; its replicas stay as they are.`, typed("autoscale", "remove", model)],
};

/** `viewer()` says whether the one who looks may act. */
export function actor(dialog, viewer) {
  return (action) => {
    const [words, command] = WORDS[action.action](action);
    const { may_act: mayAct, owner } = viewer() ?? {};
    const outcome = h("p", { role: "status" });
    const code = h("code", { tabindex: "0" }, command);
    const confirm = h("button", { type: "button", class: "primary", disabled: !mayAct, onclick: async () => {
      confirm.disabled = true;
      say(outcome, "under way");
      try {
        const response = await ask("console/actions", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(action) });
        say(outcome, `Done: ${(await response.json()).message}.`);
      } catch (error) {
        say(outcome, `Not done: ${error.message}`);
        confirm.disabled = false;
      }
    } }, "Do it");
    const why = mayAct ? null : h("p", { class: "note" }, owner ? "Your key is not an operator's: type the command, or give an operator's key." : "This console is read-only, because no API keys are configured: type the command.");
    dialog.replaceChildren(h("h2", { id: "action-title" }, "Do this?"), h("p", {}, words), h("p", {}, "The same, typed: ", code), ...(why ? [why] : []), outcome,
      h("p", { class: "buttons" }, confirm, " ", h("button", { type: "button", onclick: () => dialog.close() }, "Close")));
    dialog.showModal();
  };
}
