// Numbers with their units, times, and the words for what the router tells in codes.

const whole = new Intl.NumberFormat("en");
const clockTime = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
const shortTime = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const dayTime = new Intl.DateTimeFormat(undefined, {
  weekday: "short", hour: "2-digit", minute: "2-digit", hourCycle: "h23",
});

export const count = (number) => whole.format(number);
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

export function compact(number) {
  if (number < 10000) return count(Math.round(number));
  const [size, unit] = number < 1e6 ? [1e3, "k"] : [1e6, "M"];
  return `${(number / size).toFixed(number / size < 100 ? 1 : 0)}\u00a0${unit}`;
}

/** Seconds of waiting: 31 ms, 1.2 s, 14 s. */
export function quick(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds === 0) return "0\u00a0ms";
  if (seconds < 0.9995) return `${seconds < 0.00995 ? (seconds * 1000).toFixed(1) : Math.round(seconds * 1000)}\u00a0ms`;
  return seconds < 60 ? `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)}\u00a0s` : long(seconds);
}

/** Seconds of life: 42 s, 6 min, 2 h 14 min, 3 d 4 h. */
export function long(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s}\u00a0s`;
  const minutes = Math.floor(s / 60);
  if (minutes < 60) return `${minutes}\u00a0min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return minutes % 60 ? `${hours}\u00a0h ${minutes % 60}\u00a0min` : `${hours}\u00a0h`;
  return hours % 24 ? `${Math.floor(hours / 24)}\u00a0d ${hours % 24}\u00a0h` : `${Math.floor(hours / 24)}\u00a0d`;
}

export const share = (part) => {
  const percent = part * 100;
  return `${percent > 0 && percent < 10 ? percent.toFixed(1) : Math.round(percent)}\u00a0%`;
};

export const usd = (amount) => `${amount.toFixed(amount < 10 ? 2 : 0)}\u00a0USD`;

export function clock(at, form = clockTime) {
  return form.format(new Date(at * 1000));
}
export const near = (at, now) => clock(at, Math.abs(at - now) < 64800 ? shortTime : dayTime);
export const utc = (at) => `${new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ")} UTC`;

/** Why calls wait: few words, and what it means. The codes are the router's `reason`. */
export const REASONS = {
  no_room: ["no room", "The nodes are full."],
  chat_waits: ["chat waits first", "Interactive calls wait for room and go first."],
  chat_prefill: ["chat is being read", "An interactive call has just come to the node."],
  chat_decode: ["chat is being answered", "Interactive calls are being answered on the node."],
  chat_expected: ["chat is expected", "The pauses between interactive calls are too short for its prompt."],
  batch_prefill: ["another long prompt is read", "A node reads one long prompt at a time."],
  packing: ["chat is packed here", "Interactive calls fill the nodes they are placed on."],
  kept_elsewhere: ["its node is busy", "The node that has read a part of its prompt is busy."],
  engine_queue: ["the engine has a queue", "The engines have calls waiting."],
  nodes_down: ["no node is up", "No node that serves the model is up."],
  nodes_busy: ["nodes refuse", "The nodes refuse calls for the moment."],
};

/** How calls fail. */
export const OUTCOMES = {
  refused: "refused", timed_out: "timed out", failed: "failed", cut: "broken off",
};

export const POOLS = { interactive: "chat", batch: "batch" };

/** What is said of chat: few words, how bad it is (good, warn, bad, none), and what it means. */
export const VERDICTS = {
  fine: ["fine", "good", "First tokens come within the objective, and calls do not fail."],
  slow: ["over its objective", "warn", "Of 100 calls, more than 5 waited longer for their first token than they should."],
  failing: ["failing", "bad", "More than 2 % of the calls failed, timed out or were refused."],
  quiet: ["no calls", "none", "Nobody asked in the last 5 minutes. Nodes are up."],
  relay_only: ["on the relay", "warn", "No node is up; the relay answers the models it may."],
  down: ["cannot be served", "bad", "No node is up, and there is no relay."],
};

/** What to do about it: the first step, and the section of docs/runbooks.md with the rest. */
export const TODO = {
  slow: ["If one node's first token is long, drain it. If all are and batch is reading, drain batch from one. If only chat runs, add a node or a relay.", "EbbtideChatSlow"],
  failing: ["The evidence says where and how. One node: drain it. Refused before any node: there is no room, add a node or a relay.", "EbbtideChatFailing"],
  relay_only: ["See below why the nodes are down; they are let in by themselves once they answer.", "EbbtideNoNodeUp"],
  down: ["See below why the nodes are down; callers get 503 until one answers.", "EbbtideNoNodeUp"],
  store: ["Chat goes on, and no line is lost. Bring the database back or make room on its disk; nothing else is needed.", "EbbtideStoreTrouble"],
  late: ["Cancel a batch that matters less, or let late lines go to the relay (batches.relay).", "EbbtideBatchBehind"],
  stuck: ["Nothing if chat is why: lines go on when it ebbs. Else see below which node is ill.", "EbbtideBatchStuck"],
  node_down: ["Start or mend it: it is let in by itself. The others carry its share until then.", "EbbtideNodeDown"],
  ill: ["Recycle it at a quiet moment where memory grows; its evidence is below.", "EbbtideNodeDiagnosed"],
  capped: ["Raise relay.spend.usd_a_day and reload, or wait: the oldest hours drop out by themselves.", "EbbtideRelayCapped"],
  carries: ["Find out why chat leaves: nodes that are down or full, or a model only the relay has.", "EbbtideRelayCarriesChat"],
};

export const STATES = {
  ready: "good", starting: "none", busy: "warn", probation: "warn", down: "bad", draining: "warn", degraded: "warn",
  recycling: "warn",
};

export const PARTS = [
  ["interactive", "chat"],
  ["reserve", "kept for chat"],
  ["prefill", "batch, reading"],
  ["decode", "batch, writing"],
  ["foreign", "others'"],
  ["free", "free"],
];

export const PHASES = { prefill: "reading", decode: "writing" };
export const ENGINES = {
  vllm: "vLLM", sglang: "SGLang", llamacpp: "llama.cpp", ollama: "Ollama", openai: "OpenAI-compatible", auto: "not known",
};
export const TOPICS = {
  node: "node", take_back: "take-back", batch: "batch", recycle: "recycle", settings: "settings", operator: "operator",
};
