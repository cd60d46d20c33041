// Runs one scenario with OpenAI's npm client, as it comes, and prints what it saw as JSON.
// node client.js BASE_URL MODEL SCENARIO

import OpenAI from "openai";

const [baseURL, model, scenario] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "any", maxRetries: 0, timeout: 20_000 });
const messages = [{ role: "user", content: "hello" }];
const tools = ["level", "flow"].map((name) => ({ type: "function", function: { name, parameters: { type: "object" } } }));

const classOf = (error) =>
  ["BadRequestError", "NotFoundError", "RateLimitError", "InternalServerError", "PermissionDeniedError", "APIError"].find(
    (name) => error instanceof OpenAI[name],
  );

async function failure(work) {
  try {
    await work();
  } catch (error) {
    return {
      class: classOf(error),
      status: error.status ?? null,
      code: error.code,
      param: error.param ?? null,
      type: error.type,
      has_request_id: Boolean(error.requestID),
    };
  }
  return null;
}

async function streamed(parameters = {}) {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 5, stream: true, ...parameters });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

const scenarios = {
  async chat() {
    const { data, request_id } = await client.chat.completions
      .create({ model, messages, max_tokens: 5 })
      .withResponse();
    return { answer: data, request_id, chunks: await streamed() };
  },
  async usage() {
    return streamed({ stream_options: { include_usage: true } });
  },
  async others() {
    const text = [];
    for await (const chunk of await client.completions.create({ model, prompt: "hello", stream: true }))
      text.push(chunk.choices[0].text);
    const models = [];
    for await (const each of client.models.list()) models.push(each.id);
    const embeddings = await client.embeddings.create({ model, input: ["a", "b"] });
    return { text: text.join(""), models, vectors: embeddings.data.map((each) => each.embedding.length) };
  },
  async tools() {
    const runner = client.chat.completions.stream({ model, messages, tools });
    const final = await runner.finalChatCompletion();
    const whole = await client.chat.completions.create({ model, messages, tools });
    return { streamed: final.choices[0], whole: whole.choices[0] };
  },
  async structured() {
    const schema = { type: "object", properties: { metres: { type: "number" } }, required: ["metres"] };
    const response_format = { type: "json_schema", json_schema: { name: "level", strict: true, schema } };
    const answer = await client.chat.completions.parse({ model, messages, response_format });
    return answer.choices[0].message.content;
  },
  async errors() {
    return {
      value: await failure(() => client.chat.completions.create({ model, messages, temperature: 3 })),
      model: await failure(() => client.chat.completions.create({ model: "nothing", messages })),
      shown: await failure(() => client.models.retrieve("nothing")),
      streamed: await failure(() => streamed({ model: "nothing" })),
    };
  },
  async full() {
    return failure(() => client.chat.completions.create({ model, messages }));
  },
  async retried() {
    const { response } = await client.chat.completions
      .create({ model, messages, max_tokens: 2 }, { maxRetries: 5 })
      .withResponse();
    return { status: response.status };
  },
  async broken() {
    return failure(() => streamed({ n: 2, max_tokens: 8 }));
  },
  async left() {
    const stream = await client.chat.completions.create(
      { model, messages, max_tokens: 4000, stream: true },
      { headers: { "X-Headrace-Id": "left" } },
    );
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    return true;
  },
};

console.log(JSON.stringify(await scenarios[scenario]()));
