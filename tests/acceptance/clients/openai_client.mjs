// Runs scenarios on the Node `openai` SDK, whatever its version, and prints one JSON line for each.
//
//     node openai_client.mjs BASE KEY USER [SCENARIO...]
//
// BASE is the router without `/v1`. A scenario reports plain facts; judging them is the caller's work.

import OpenAI, { toFile } from 'openai';
import { BASE, KEY, USER, clock, each, failed, pause, run, tried, untilBusy } from './facts.mjs';

const SAY = [{ role: 'user', content: 'hello' }];
const made = (options = {}) => new OpenAI({ baseURL: `${BASE}/v1`, apiKey: KEY, maxRetries: 0, timeout: 20000, ...options });
const client = made();
const patient = made({ maxRetries: 2 });

const chat = async (model = 'tiny', { api = client, options = {}, ...fields } = {}) => {
  const answer = await api.chat.completions.create({ model, messages: SAY, user: USER, ...fields }, options);
  return { kind: typeof answer, text: answer.choices?.[0]?.message?.content ?? null, request_id: answer._request_id ?? null };
};

const streamed = async (model = 'tiny', fields = {}) => {
  const facts = { text: '', chunks: 0, usage: null, empty: 0, odd: 0 };
  const began = clock();
  try {
    const chunks = await client.chat.completions.create({ model, messages: SAY, user: USER, stream: true, ...fields });
    for await (const chunk of chunks) {
      facts.chunks += 1;
      facts.odd += chunk.choices === undefined ? 1 : 0;
      facts.empty += chunk.choices?.length === 0 ? 1 : 0;
      facts.usage = chunk.usage?.total_tokens ?? facts.usage;
      for (const choice of chunk.choices ?? []) facts.text += choice.delta?.content ?? '';
    }
  } catch (error) {
    Object.assign(facts, failed(error));
  }
  return { ...facts, seconds: clock() - began };
};

const responseEvents = async (model) => {
  const facts = { events: [], numbers: [] };
  try {
    for await (const event of await client.responses.create({ model, input: 'x', stream: true })) {
      facts.events.push(event.type);
      facts.numbers.push(event.sequence_number ?? null);
    }
  } catch (error) {
    Object.assign(facts, failed(error));
  }
  return facts;
};

const SCENARIOS = {
  plain: () => tried(chat),
  without_v1: () => tried(() => chat('tiny', { api: made({ baseURL: BASE }) })),
  models: async () => {
    const facts = {};
    for await (const model of client.models.list()) facts[model.id] = model;
    return facts;
  },
  model_by_name: () => tried(() => client.models.retrieve('org/name')),
  unknown_model: async () => ({
    retrieve: await tried(() => client.models.retrieve('org/nope')),
    chat: await tried(() => chat('nope')),
  }),
  request_ids: async () => {
    const raw = await client.chat.completions.create({ model: 'tiny', messages: SAY, stream: true }).withResponse();
    raw.data.controller.abort();
    return {
      chat: (await chat()).request_id,
      embeddings: (await client.embeddings.create({ model: 'tiny', input: 'x' }))._request_id ?? null,
      models: (await client.models.list().withResponse()).request_id ?? null,
      stream: raw.request_id ?? null,
      error: (await tried(() => chat('nope'))).request_id,
      refused: (await tried(() => chat('refused'))).request_id,
    };
  },
  extras: () =>
    tried(() =>
      chat('tiny', { user: `${USER}-extras`, priority: 5, foo: { bar: [1, null] }, options: { query: { q: '1' } } }),
    ),
  gzipped: async () => ({ whole: await tried(() => chat('relayed')), stream: await streamed('relayed') }),
  embeddings: async () => ({
    default: (await client.embeddings.create({ model: 'tiny', input: 'hello' })).data[0].embedding,
    float: (await client.embeddings.create({ model: 'tiny', input: 'hello', encoding_format: 'float' })).data[0].embedding,
  }),
  prompts: async () => {
    const shapes = { text: 'a', texts: ['a', 'b'], ids: [1, 2], lists: [[1, 2], [3]] };
    return each(Object.keys(shapes), async (name) => {
      const answer = await client.completions.create({ model: 'tiny', prompt: shapes[name] });
      return answer.choices.map((choice) => choice.index);
    });
  },
  tiers: async () => ({
    ...(await each(['flex', 'priority'], async (service_tier) => {
      const request = client.chat.completions.create({ model: 'tiny', messages: SAY, service_tier });
      return (await request.withResponse()).response.headers.get('x-ebbtide-workload');
    })),
    fast: await tried(async () => ({
      kind: (await client.responses.create({ model: 'tiny', input: 'x', service_tier: 'fast' })).object,
    })),
  }),
  left_while_queued: async () => {
    const fields = { model: 'held', messages: SAY, user: `${USER}-holder`, stream: true };
    for await (const _ of await client.chat.completions.create(fields))
      return await tried(() => chat('held', { user: `${USER}-left`, options: { timeout: 200 } }));
  },
  tokenize: async () => {
    const body = { model: 'tiny', prompt: 'hello there' };
    return {
      v1: await client.post('/tokenize', { body }),
      root: await made({ baseURL: BASE }).post('/tokenize', { body }),
    };
  },
  transcription: async () => {
    const file = await toFile(Buffer.alloc(2000), 'a.wav', { type: 'audio/wav' });
    return { text: (await client.audio.transcriptions.create({ model: 'tiny', file, language: 'en' })).text };
  },
  stream: () => streamed('paced'),
  linger: () => streamed('linger'),
  cut: () => each(['cut', 'reset', 'cut-inside'], (name) => streamed(name)),
  slow: () => streamed('slow'),
  dirty: () => streamed('dirty'),
  odd_bytes: async () => ({ crlf: await streamed('crlf'), utf8: await streamed('utf8') }),
  usage: async () => ({
    asked: await streamed('tiny', { stream_options: { include_usage: true } }),
    not: await streamed(),
  }),
  stream_refused: () => streamed('refused'),
  second_node: async () => ({ whole: await tried(() => chat('pair')), stream: await streamed('pair') }),
  responses_stream: () => responseEvents('tiny'),
  responses_cut: () => tried(() => responseEvents('cut')),
  leave: async () => {
    let count = 0;
    const fields = { model: 'endless', messages: SAY, user: `${USER}-leave`, stream: true };
    for await (const _ of await client.chat.completions.create(fields)) if (++count === 4) break;
    const left = clock();
    await pause(1.0);
    return { left };
  },
  error_shapes: () => each(['refused', 'flat', 'detail', 'string', 'html'], (name) => tried(() => chat(name))),
  too_long: async () => {
    const messages = [{ role: 'user', content: 'many words '.repeat(400) }];
    return {
      ...(await each(['long-vllm', 'long-sglang', 'long-llamacpp'], (name) => tried(() => chat(name)))),
      ours: await tried(async () => ({ made: (await client.chat.completions.create({ model: 'short', messages })).id })),
    };
  },
  wrong_key: async () => ({
    bad: await tried(() => chat('tiny', { api: made({ apiKey: 'wrong' }) })),
    none: await tried(() => chat('tiny', { options: { headers: { Authorization: null } } })),
  }),
  wrong_requests: async () => ({
    method: await tried(() => patient.get('/chat/completions')),
    path: await tried(() => patient.post('/nope', { body: {} })),
    model: await tried(() => chat('nope', { api: patient })),
    media: await tried(() => chat('tiny', { api: patient, options: { headers: { 'Content-Type': 'text/plain' } } })),
  }),
  asked_to_wait: async () => {
    const holder = tried(() => chat('narrow', { user: `${USER}-holder-2` }));
    await untilBusy('narrow');
    const answered = await tried(() => chat('narrow', { user: `${USER}-again`, api: patient }));
    await holder;
    return answered;
  },
  final_errors: () =>
    each(['quota', 'unimplemented'], (name) => tried(() => chat(name, { api: patient, user: `${USER}-${name}` }))),
  never_answered: () => tried(() => chat('never')),
};

await run(SCENARIOS);
