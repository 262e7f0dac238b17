// Why calls wait, in words, with how much of all waiting each reason makes.

import { Keyed, attr, byId, el, put, show } from "./dom.js";
import { state } from "./state.js";
import { POOLS, REASONS, many, share } from "./words.js";

let list;
let empty;

export function begin() {
  const root = el("ol", { class: "why" });
  list = new Keyed(root, make);
  empty = el("p", { class: "empty" }, "Nothing waits, and nothing has in the last 5 minutes.");
  byId("why").append(root, empty);
}

function make() {
  const word = el("strong", {});
  const part = el("span", { class: "number" });
  const bar = el("span", { class: "share", "aria-hidden": "true" });
  const means = el("span", { class: "means" });
  const root = el("li", {}, el("span", { class: "share-box", "aria-hidden": "true" }, bar), part, " ", word, " ", means);
  return {
    root,
    update(wait) {
      const [few, meaning] = REASONS[wait.reason] ?? [wait.reason, ""];
      attr(root, "title", `reason ${wait.reason} of ebbtide_waiting_calls`);
      put(word, `${POOLS[wait.workload]}: ${few}`);
      put(part, share(wait.share));
      put(means, `${meaning} ${wait.now ? `${many(wait.now, "call")} now.` : ""}`);
      bar.style.width = `${Math.round(wait.share * 100)}%`;
    },
  };
}

export function render() {
  const waits = state.board.waits;
  list.render(waits.map((wait) => [`${wait.workload} ${wait.reason}`, wait]));
  show(list.parent, waits.length);
  show(empty, !waits.length);
}
