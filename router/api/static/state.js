// The one object everything is drawn from, and how the router's frames change it.

const MOST_EVENTS = 10000;

export const state = {
  live: "connecting", // connecting, live, lost
  seenAt: null, // when the router was last heard, by this machine's clock, in ms
  skew: 0, // router's clock minus ours, in seconds
  you: { name: "", keys: false, admin: false, sees_all: true, acts: [] },
  board: null,
  events: [], // newest first: { key, at, topic, text, node }
};

/** The router's time now, in unix seconds. */
export const now = () => Date.now() / 1000 + state.skew;

export function apply(event, told) {
  state.seenAt = Date.now();
  if (event === "snapshot") {
    state.skew = told.at - Date.now() / 1000;
    state.you = told.you;
    state.board = told.state;
    const fresh = listed(told.state.events);
    const known = new Set(fresh.map((one) => one.key));
    const before = state.events.filter((one) => !known.has(one.key));
    state.events = [...fresh, ...before].sort((one, other) => other.at - one.at).slice(0, MOST_EVENTS);
    return told;
  }
  if (event !== "change" || !state.board) return null;
  Object.assign(state.board, told.set);
  for (const [part, members] of Object.entries(told.put ?? {})) Object.assign(state.board[part], members);
  for (const [part, keys] of Object.entries(told.gone ?? {})) for (const key of keys) delete state.board[part][key];
  if (told.put?.events) state.events = [...listed(told.put.events), ...state.events].slice(0, MOST_EVENTS);
  if (told.set?.events) state.events = [...listed(told.set.events), ...state.events].slice(0, MOST_EVENTS);
  return told;
}

/** Another filter: what was kept of before does not fit. */
export function forget() {
  state.board = null;
  state.events = [];
}

function listed(events) {
  return Object.entries(events)
    .map(([number, [at, topic, text, node]]) => ({ key: `${number}@${at}`, number: Number(number), at, topic, text, node }))
    .sort((one, other) => other.number - one.number);
}
