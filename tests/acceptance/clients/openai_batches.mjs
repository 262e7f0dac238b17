// Files, uploads and batches on the Node `openai` SDK, whatever its version. See `facts.mjs` for how it is run.

import fs from 'node:fs';
import os from 'node:os';
import path from 'node:path';
import OpenAI, { toFile } from 'openai';
import { BASE, KEY, USER, clock, each, pause, run, tried } from './facts.mjs';

const CHAT = '/v1/chat/completions';
const ENDED_S = 40;
const made = (options = {}) => new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY, maxRetries: 0, timeout: 20000, ...options });
const client = made();
const patient = made({ maxRetries: 2 });

const line = (custom_id, model = 'tiny', body = {}) => ({
  custom_id,
  method: 'POST',
  url: CHAT,
  body: { model, messages: [{ role: 'user', content: `${USER} ${custom_id}` }], max_tokens: 3, ...body },
});
const jsonl = (...lines) => Buffer.from(lines.map((one) => `${JSON.stringify(one)}\n`).join(''));

const stored = async (content, name = 'in.jsonl', purpose = 'batch', more = {}) =>
  client.files.create({ file: await toFile(content, name), purpose, ...more });

const began = async (lines, more = {}) => {
  const input_file_id = (await stored(jsonl(...lines))).id;
  return client.batches.create({ input_file_id, endpoint: CHAT, completion_window: '24h', ...more });
};

const until = async (batch, reached) => {
  const deadline = clock() + ENDED_S;
  for (;;) {
    const now = await client.batches.retrieve(batch.id);
    if (reached(now)) return now;
    if (clock() > deadline) throw new Error(`${now.id} is ${now.status}: ${JSON.stringify(now.request_counts)}`);
    await pause(0.05);
  }
};
const ended = (batch) => until(batch, (now) => ['completed', 'failed', 'expired', 'cancelled'].includes(now.status));

const linesOf = async (id) => {
  if (!id) return [];
  const text = await (await client.files.content(id)).text();
  return text.split('\n').filter(Boolean).map((told) => JSON.parse(told));
};
const told = async (batch) => ({
  batch,
  output: await linesOf(batch.output_file_id),
  errors: await linesOf(batch.error_file_id),
});

const all = async (pages) => {
  const found = [];
  for await (const one of pages) found.push(one);
  return found;
};

const halfDone = async (more) => {
  const lines = [0, 1, 2].map((at) => line(`fast-${at}`)).concat([0, 1, 2, 3].map((at) => line(`slow-${at}`, 'slow')));
  return until(await began(lines, more), (now) => now.request_counts.completed === 3);
};

const SCENARIOS = {
  file_sent_in_pieces: async () => {
    const content = Buffer.concat([jsonl(line('a')), Buffer.from(`{"x":"${'y'.repeat(3e6)}"}\n`)]);
    const home = fs.mkdtempSync(path.join(os.tmpdir(), 'batch-'));
    const name = path.join(home, 'night.jsonl');
    try {
      fs.writeFileSync(name, content);
      const file = await client.files.create({ file: fs.createReadStream(name), purpose: 'batch' });
      const got = Buffer.from(await (await client.files.content(file.id)).arrayBuffer());
      return { name: file.filename, sizes: [content.length, file.bytes], same: got.equals(content) };
    } finally {
      fs.rmSync(home, { recursive: true });
    }
  },
  file_expires: async () => {
    const expiring = (seconds) => stored('x', 'a.txt', 'user_data', { expires_after: { anchor: 'created_at', seconds } });
    const file = await expiring(7200);
    const wrong = await each([60, 2592001], (seconds) => tried(async () => ({ made: (await expiring(seconds)).id })));
    return { seconds: file.expires_at - file.created_at, wrong: Object.values(wrong) };
  },
  files_listed: async () => {
    const ids = [];
    for (const at of [0, 1, 2]) ids.push((await stored('x', `${at}.txt`, 'user_data')).id);
    ids.push((await stored(jsonl(line('a')))).id);
    const more = [];
    for await (const page of (await client.files.list({ limit: 2 })).iterPages()) more.push(page.has_more);
    const first = (await client.files.list({ limit: 1 })).data[0].id;
    const idsOf = async (query) => (await all(client.files.list(query))).map((file) => file.id);
    return {
      made: ids,
      by_two: await idsOf({ limit: 2 }),
      at_once: await idsOf({}),
      more,
      ascending: await idsOf({ order: 'asc', limit: 2 }),
      purposes: (await all(client.files.list({ purpose: 'user_data', limit: 2 }))).map((file) => file.purpose),
      first,
      after: await idsOf({ after: first }),
    };
  },
  file_content: async () => {
    const content = Buffer.from('{"a":"ü \u2028 你好"}\r\n\n{"b":2}\n');
    const file = await stored(content, 'nächt.jsonl');
    const got = await client.files.content(file.id);
    const disposition = got.headers.get('content-disposition');
    const bytes = Buffer.from(await got.arrayBuffer());
    const text = await (await client.files.content(file.id)).text();
    return { same: bytes.equals(content), text: text === content.toString(), lines: [JSON.parse(text.split('\n')[2])], disposition };
  },
  file_deleted: async () => {
    const file = await stored('x', 'a.txt', 'user_data');
    return { first: await client.files.delete(file.id), second: await tried(() => client.files.delete(file.id)) };
  },
  unknown_file: async () => ({
    retrieve: await tried(() => client.files.retrieve('file-nope')),
    content: await tried(async () => ({ got: (await client.files.content('file-nope')).status })),
    delete: await tried(() => client.files.delete('file-nope')),
  }),
  batch_seen_through: async () => {
    const lines = [line('good'), line('bad', 'tiny', { max_tokens: -1 }), line('better')];
    const created = await began(lines, { metadata: { night: '5' } });
    return { created, ...(await told(await ended(created))) };
  },
  batch_cancelled: async () => {
    const batch = await halfDone();
    const first = await client.batches.cancel(batch.id);
    const again = (await client.batches.cancel(batch.id)).status;
    const done = await told(await ended(batch));
    return { ...done, first, again, after: (await client.batches.cancel(batch.id)).status };
  },
  cancelled_too_late: async () => {
    const batches = { completed: await began([line('a')]), failed: await began([line('a', 'nope')]) };
    for (const batch of Object.values(batches)) await ended(batch);
    return each(Object.keys(batches), (name) =>
      tried(async () => ({ got: (await patient.batches.cancel(batches[name].id)).status })),
    );
  },
  batches_listed: async () => {
    const ids = [];
    for (let at = 0; at < 3; at += 1) ids.push((await began([line('a')])).id);
    const listed = await all(client.batches.list({ limit: 1 }));
    return {
      made: ids,
      listed: listed.map((batch) => batch.id),
      times: listed.filter((batch) => batch.completion_window === '24h').map((batch) => batch.created_at),
      at_once: (await all(client.batches.list({ limit: 100 }))).map((batch) => batch.id),
      unknown: await tried(async () => ({ got: (await client.batches.retrieve('batch_nope')).status })),
    };
  },
};

await run(SCENARIOS);
