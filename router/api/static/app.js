// Begins everything: the stream, the filters, the key, the theme; draws on animation frames, once for many changes.

import { keep, theKey } from "./acts.js";
import * as answers from "./answers.js";
import * as batches from "./batches.js";
import * as charts from "./charts.js";
import { attr, byId, el, put, show } from "./dom.js";
import * as events from "./events.js";
import * as nodes from "./nodes.js";
import { apply, forget, now, state } from "./state.js";
import { Stream } from "./stream.js";
import * as why from "./why.js";
import { clock, long, utc } from "./words.js";

const PANELS = [answers, why, nodes, charts, batches, events];
const WORDS = { connecting: "connecting", live: "live", lost: "router lost" };
const FILTERS = { model: "models", pool: "pools", node: "nodes", key: "keys" };
const filters = byId("filters");
let assets = null;
let asked = false;

const stream = new Stream({
  told(event, told) {
    const fresh = apply(event, told);
    if (event === "snapshot") {
      if (assets && assets !== told.assets) location.reload();
      assets = told.assets;
      show(byId("login"), false);
      show(byId("board"), true);
      show(byId("leave"), state.you.keys);
    }
    if (state.live !== "live") turn("live");
    if (fresh) draw();
  },
  lost(wait, why) {
    turn("lost", wait, why);
  },
  refused(status, text) {
    if (status === 401) login(theKey() ? text : "");
    else notice(text);
  },
});

/** The stream came, or stopped: the page says so, and greys while what it shows may be old. */
function turn(live, wait = 0, text = "") {
  const before = state.live;
  state.live = live;
  attr(byId("live"), "data-state", live);
  attr(document.body, "data-live", live);
  put(byId("live-word"), WORDS[live]);
  show(byId("lost"), live === "lost" && byId("login").hidden);
  if (live === "lost") {
    const seen = state.seenAt ? `last seen ${clock(state.seenAt / 1000)}` : "not seen yet";
    const again = wait > 1500 ? `Trying again in ${Math.round(wait / 1000)} s.` : "Trying again.";
    put(byId("lost"), `Router lost, ${seen}. ${text ? `${text} ` : ""}${again} What is shown may be old.`);
    document.title = "lost · Ebbtide";
  } else if (before === "lost") {
    tell("The router is back.");
  }
}

function tell(text) {
  put(byId("told"), text);
}

function notice(text) {
  put(byId("notice"), text);
  show(byId("notice"), text);
}

function draw() {
  if (!asked) {
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      if (state.board) render();
    });
  }
}

let verdict = "";
function render() {
  for (const panel of PANELS) panel.render();
  offer(state.board.choices);
  const [word] = answers.verdict();
  if (word !== verdict) tell(`Chat: ${word}.`);
  verdict = word;
  document.title = `${state.live === "lost" ? "lost" : word} · Ebbtide`;
  put(byId("version"), `Ebbtide ${state.board.router.version}${state.you.name ? `, seen by ${state.you.name}` : ""}.`);
  notice(state.board.router.draining ? "The router is shutting down: it takes no new calls." :
    state.you.sees_all ? "" : "With this key you see your own batches; another with admin: true sees all.");
}

/** What the filters can be set to; nothing is touched while the choices are the same. */
let offered = "";
function offer(choices) {
  const told = JSON.stringify(choices);
  if (told === offered) return;
  offered = told;
  for (const [name, part] of Object.entries(FILTERS)) {
    const select = filters.elements[name];
    const chosen = select.value || wished().get(name) || "";
    const values = [...new Set([...choices[part], ...(chosen ? [chosen] : [])])];
    select.replaceChildren(el("option", { value: "" }, "all"), ...values.map((value) => el("option", { value }, value)));
    select.value = chosen;
    show(select.parentElement, choices[part].length > 1 || chosen);
  }
  const chosen = Object.keys(FILTERS).filter((name) => filters.elements[name].value);
  put(byId("filtered"), chosen.length ? `: ${chosen.map((name) => filters.elements[name].value).join(", ")}` : "");
}

const wished = () => new URLSearchParams(location.search);

function wish() {
  const query = new URLSearchParams();
  for (const name of Object.keys(FILTERS)) if (filters.elements[name].value) query.set(name, filters.elements[name].value);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  notice("");
  forget();
  open();
}

function open() {
  const known = wished();
  const query = new URLSearchParams();
  for (const name of Object.keys(FILTERS)) if (known.get(name)) query.set(name, known.get(name));
  stream.open(query, theKey());
}

function login(error) {
  show(byId("board"), false);
  show(byId("login"), true);
  show(byId("lost"), false);
  put(byId("login-error"), error);
  put(byId("live-word"), "needs a key");
  byId("key").focus();
}

const THEMES = ["auto", "light", "dark"];
function theme(chosen) {
  if (chosen === "auto") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("ebbtide-theme");
  } else {
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem("ebbtide-theme", chosen);
  }
  put(byId("theme"), `Theme: ${chosen}`);
  charts.recolour();
  draw();
}

function begin() {
  for (const panel of PANELS) panel.begin();
  byId("filter-box").open = matchMedia("(min-width: 641px)").matches;
  put(byId("theme"), `Theme: ${document.documentElement.dataset.theme ?? "auto"}`);
  byId("theme").addEventListener("click", () => {
    theme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length]);
  });
  filters.addEventListener("change", wish);
  filters.addEventListener("submit", (event) => event.preventDefault());
  byId("login").addEventListener("submit", (event) => {
    event.preventDefault();
    keep(byId("key").value.trim());
    byId("key").value = "";
    open();
  });
  byId("leave").addEventListener("click", () => {
    keep("");
    forget();
    open();
  });
  setInterval(() => {
    const time = byId("clock");
    put(time, clock(now()));
    attr(time, "title", utc(now()));
    if (state.live === "lost" && state.seenAt) attr(byId("lost"), "title", `${long((Date.now() - state.seenAt) / 1000)} ago`);
  }, 1000);
  open();
}

begin();
