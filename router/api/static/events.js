// What happened, newest first.

import { Pager, attr, byId, el, put, show } from "./dom.js";
import { state } from "./state.js";
import { TOPICS, clock, count, utc } from "./words.js";

let pager;
let empty;

export function begin() {
  pager = new Pager(byId("events"), 25, "events", make, "ol");
  pager.list.classList.add("events");
  empty = el("p", { class: "empty" }, "Nothing yet: state changes of nodes, take-backs and what operators do are told here.");
  byId("events").append(empty);
}

function make() {
  const [time, topic, text] = [el("time", {}), el("span", { class: "topic" }), el("span", {})];
  return {
    root: el("li", {}, time, " ", topic, " ", text),
    update(one) {
      put(time, clock(one.at));
      attr(time, "title", utc(one.at));
      attr(time, "datetime", new Date(one.at * 1000).toISOString());
      put(topic, one.node ? `${TOPICS[one.topic] ?? one.topic} · ${one.node}` : TOPICS[one.topic] ?? one.topic);
      put(text, one.text);
    },
  };
}

export function render() {
  put(byId("events-count"), state.events.length ? `the last ${count(state.events.length)}, newest first` : "");
  show(empty, !state.events.length);
  show(pager.list, state.events.length);
  pager.render(state.events.map((one) => [one.key, one]));
}
