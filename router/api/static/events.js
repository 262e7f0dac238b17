// What happened, newest first; one kind of it alone where that is asked for.

import { Pager, attr, byId, el, put, show } from "./dom.js";
import { state } from "./state.js";
import { TOPICS, clock, count, utc } from "./words.js";

let pager;
let empty;
let topic;

export function begin() {
  const values = [["", "everything"], ...Object.entries(TOPICS)];
  topic = el("select", { id: "topic", onchange: () => state.board && render() }, ...values.map(([value, word]) => el("option", { value }, word)));
  byId("events").append(el("label", { class: "topics" }, "Show ", topic));
  pager = new Pager(byId("events"), 25, "events", make, "ol");
  pager.list.classList.add("events");
  empty = el("p", { class: "empty" }, "Nothing yet: state changes of nodes, take-backs and what operators do are told here.");
  byId("events").append(empty);
}

function make() {
  const [time, about, text] = [el("time", {}), el("span", { class: "topic" }), el("span", {})];
  return {
    root: el("li", {}, time, " ", about, " ", text),
    update(one) {
      put(time, clock(one.at));
      attr(time, "title", utc(one.at));
      attr(time, "datetime", new Date(one.at * 1000).toISOString());
      const word = TOPICS[one.topic] ?? one.topic;
      put(about, one.node ? `${word} · ${one.node}` : word);
      put(text, one.text);
    },
  };
}

export function render() {
  const shown = topic.value ? state.events.filter((one) => one.topic === topic.value) : state.events;
  put(byId("events-count"), shown.length ? `the last ${count(shown.length)}, newest first` : "");
  show(topic.parentElement, state.events.length);
  show(empty, !shown.length);
  show(pager.list, shown.length);
  pager.render(shown.map((one) => [one.key, one]));
}
