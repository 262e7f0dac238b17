// Unwraps webhook events with the Node `openai` SDK, whatever its version.
//
//     node webhook_client.mjs < events
//
// Reads one JSON object a line, `headers`, `body` and `secret`, and prints what came of each: the event's type and the
// batch's id, or the name of the exception.

import fs from 'node:fs';
import OpenAI from 'openai';

const client = new OpenAI({ apiKey: 'none' });
for (const line of fs.readFileSync(0, 'utf8').trim().split('\n')) {
  const { headers, body, secret } = JSON.parse(line);
  try {
    const event = await client.webhooks.unwrap(body, headers, secret);
    console.log(JSON.stringify([event.type, event.data.id]));
  } catch (error) {
    console.log(JSON.stringify([error.constructor.name]));
  }
}
