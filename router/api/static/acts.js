// What may be done, each after a question that says what will happen.

import { byId, el, put } from "./dom.js";
import { state } from "./state.js";
import { message } from "./stream.js";
import { many } from "./words.js";

let key = sessionStorage.getItem("ebbtide-key") ?? "";

export const theKey = () => key;

export function keep(given) {
  key = given;
  if (given) sessionStorage.setItem("ebbtide-key", given);
  else sessionStorage.removeItem("ebbtide-key");
}

async function ask(method, path) {
  const answer = await fetch(path, { method, headers: key ? { authorization: `Bearer ${key}` } : {} });
  if (!answer.ok) throw new Error(await message(answer));
  return answer.json();
}

export const get = (path) => ask("GET", path);

/** Ask first; on yes do it. The dialog stays open and tells when it could not be done. */
function confirm(title, what, yes, path) {
  const dialog = byId("ask");
  put(byId("ask-h"), title);
  byId("ask-what").replaceChildren(...what.map((line) => el("li", {}, line)));
  put(byId("ask-error"), "");
  const button = byId("ask-yes");
  put(button, yes);
  button.disabled = false;
  button.onclick = async () => {
    button.disabled = true;
    try {
      await ask("POST", path);
      put(byId("told"), `${yes}: done.`);
      dialog.close();
    } catch (error) {
      put(byId("ask-error"), error.message);
      button.disabled = false;
    }
  };
  dialog.showModal();
  byId("ask-no").focus();
}

export function cancel(batch) {
  const waiting = Math.max(0, batch.left - batch.running);
  confirm(`Cancel ${batch.id}?`, [
    `${many(batch.running, "line")} that ${batch.running === 1 ? "runs is" : "run are"} stopped at once.`,
    `${many(waiting, "line")} that ${waiting === 1 ? "waits" : "wait"} will not run.`,
    `${many(batch.completed + batch.failed, "line")} with an answer will be in its files.`,
    "It cannot be undone.",
  ], "Cancel the batch", `/dashboard/batches/${encodeURIComponent(batch.id)}/cancel`);
}

export function operate(act, name) {
  const node = state.board.nodes[name];
  const phases = node.phases;
  const chats = phases.interactive_prefill + phases.interactive_decode;
  const batch = phases.batch_prefill + phases.batch_decode;
  const others = Object.entries(state.board.nodes).filter(
    ([other, one]) => other !== name && one.state === "ready" && one.models.some((model) => node.models.includes(model))).length;
  const rest = others ? `${many(others, "other ready node")} with its models ${others === 1 ? "goes" : "go"} on.`
    : "No other ready node has its models: its calls will wait, go to the relay or be refused.";
  const leaving = [`It gets no new calls.`, `${many(chats, "running chat")} will finish first.`,
    `${many(batch, "batch line")} will finish or go back in the queue.`, rest];
  const told = {
    drain: [`Drain node ${name}?`, leaving, "Drain it"],
    resume: [`Resume node ${name}?`, ["It gets calls again, slowly at first."], "Resume it"],
    recycle: [`Recycle node ${name}?`, [...leaving, "Then its recycle hook runs, and it comes back once it answers."], "Recycle it"],
  }[act];
  confirm(...told, `/dashboard/nodes/${encodeURIComponent(name)}/${act}`);
}
