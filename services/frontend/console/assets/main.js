// Puts the views, the feed and the address bar together.

import { actor } from "./actions.js";
import { Autoscale } from "./autoscale.js";
import { h, say } from "./dom.js";
import { ask, Feed, key } from "./feed.js";
import { Playground } from "./playground.js";
import { Requests } from "./requests.js";
import { Cascades, drawFaults, Instances, Overview, Placement } from "./views.js";

const byId = (id) => document.getElementById(id);
const content = byId("content"), live = byId("live"), faults = byId("faults"), keyDialog = byId("key-dialog");
const feed = new Feed(() => schedule(), showStatus);
const act = actor(byId("action-dialog"), () => feed.state?.viewer);

const makers = {
  overview: () => new Overview(),
  instances: () => new Instances(act),
  requests: () => new Requests(act, async (id) => (await ask(`console/requests/${encodeURIComponent(id)}`)).json()),
  placement: () => new Placement(act),
  cascades: () => new Cascades(act),
  autoscale: () => new Autoscale(act),
  playground: () => new Playground(),
};
const views = {};
let shown = "", frame = null;

function schedule() {
  frame ??= requestAnimationFrame(() => {
    frame = null;
    if (!feed.state) return;
    const began = performance.now();
    drawFaults(faults, feed.state.body.faults);
    views[shown]?.update(feed.state);
    performance.measure("penstock-frame", { start: began, end: performance.now() });
  });
}

function route() {
  const [name, argument = ""] = location.hash.slice(1).split("/");
  const next = makers[name] ? name : "overview";
  views[next] ??= makers[next]();
  if (next !== shown) {
    shown = next;
    content.replaceChildren(views[next].element);
    document.title = `${next[0].toUpperCase()}${next.slice(1)} – Penstock`;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash === `#${next}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }
  views[next].show?.(decodeURIComponent(argument));
  schedule();
}

function showStatus({ text, isLive = false, needsKey = false }) {
  say(live, isLive ? `live${feed.state?.viewer.may_act ? ", operator" : ""}` : text);
  live.className = isLive ? "ok" : "bad";
  if (needsKey && !keyDialog.open) {
    if (!feed.state) content.replaceChildren(h("p", { class: "empty" }, "This mesh asks for an API key."));
    askForKey();
  }
}

function askForKey() {
  byId("key-input").value = "";
  keyDialog.returnValue = "";
  keyDialog.showModal();
}

keyDialog.addEventListener("close", () => {
  if (keyDialog.returnValue === "set") key.set(byId("key-input").value.trim());
  else if (keyDialog.returnValue === "forget") key.set("");
  else return;
  feed.state = null;
  shown = "";
  feed.restart();
  route();
});
byId("key-button").addEventListener("click", askForKey);
byId("theme-button").addEventListener("click", () => {
  const isDark = getComputedStyle(document.documentElement).colorScheme.trim() === "dark";
  setTheme(isDark ? "light" : "dark");
});

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  localStorage.setItem("penstock-theme", theme);
  schedule();
}

document.documentElement.dataset.theme =
  localStorage.getItem("penstock-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
addEventListener("hashchange", route);
route();
feed.restart();
