// The router's stream, read with fetch so that the key goes in a header; comes back by itself, slower each time.

const SILENT_MS = 13000; // the router says something every 5 s
const AGAIN_MS = [500, 10000];
const FINAL = [400, 401, 403]; // asking the same again will not help

export class Stream {
  /** `told` hears frames, `lost` that the stream stopped (when it is tried again, and why if told), `refused` a status. */
  constructor({ told, lost, refused }) {
    Object.assign(this, { told, lost, refused });
    this.turn = 0;
    this.tries = 0;
    for (const [target, event] of [[window, "online"], [document, "visibilitychange"]]) {
      target.addEventListener(event, () => this.waiting && !document.hidden && this.waiting());
    }
  }

  /** Read from now on what `query` asks for, with this key (or none). Whatever was read before is over. */
  open(query, key) {
    this.close();
    this.read(this.turn, query, key);
  }

  close() {
    this.turn += 1;
    this.tries = 0;
    this.control?.abort();
    this.waiting?.();
  }

  async read(turn, query, key) {
    while (turn === this.turn) {
      let why = "";
      try {
        await this.once(turn, query, key);
      } catch (error) {
        if (FINAL.includes(error.status)) {
          if (turn === this.turn) this.refused(error.status, error.message);
          return;
        }
        why = error.status ? error.message : "";
      }
      if (turn !== this.turn) return;
      const wait = Math.min(AGAIN_MS[1], AGAIN_MS[0] * 2 ** this.tries) * (0.75 + Math.random() / 2);
      this.tries += 1;
      this.lost(wait, why);
      await new Promise((done) => {
        const timer = setTimeout(done, wait);
        this.waiting = () => { clearTimeout(timer); done(); };
      });
      this.waiting = null;
    }
  }

  async once(turn, query, key) {
    const control = (this.control = new AbortController());
    let alarm = setTimeout(() => control.abort(), SILENT_MS);
    try {
      const headers = key ? { authorization: `Bearer ${key}` } : {};
      const answer = await fetch(`/dashboard/events?${query}`, { headers, signal: control.signal, cache: "no-store" });
      if (!answer.ok) throw Object.assign(new Error(await message(answer)), { status: answer.status });
      const reader = answer.body.getReader();
      const decoder = new TextDecoder();
      let held = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done || turn !== this.turn) return;
        clearTimeout(alarm);
        alarm = setTimeout(() => control.abort(), SILENT_MS);
        this.tries = 0;
        const frames = (held + decoder.decode(value, { stream: true })).split("\n\n");
        held = frames.pop();
        for (const frame of frames) this.frame(frame);
      }
    } finally {
      clearTimeout(alarm);
      control.abort();
    }
  }

  frame(frame) {
    let event = "message";
    let data = "";
    for (const line of frame.split("\n")) {
      if (line.startsWith("event: ")) event = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
    }
    if (data) this.told(event, JSON.parse(data));
  }
}

/** What the router said of an error. */
export async function message(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The router answered with status ${answer.status}.`;
  }
}
