// Talks to a running server through the official `openai` package for Node.
//
// Usage: node openai_client.cjs BASE_URL. Prints `ok NAME` for each check that holds; the first one
// that does not ends the program with its error and exit code 1.

"use strict";

const assert = require("node:assert/strict");
const OpenAI = require("openai");

const MODEL = "dsv4-mini";
const PARAMETERS = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city"],
};
const WEATHER = {
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather forecast of a city.",
    parameters: PARAMETERS,
  },
};
const FACTS =
  "The code of the red vault in Oslo is 55231. Rain is expected in Lima on Monday. " +
  "The serial number of the Kyoto pump is 90417. Ada walked past the kiosk without a word.";
const QUESTION = "What will the weather be in Lima for the next 3 days?";
const VERDICT = {
  type: "object",
  properties: { ok: { type: "boolean" }, word: { enum: ["yes", "no"] } },
  required: ["ok", "word"],
  additionalProperties: false,
};

const client = new OpenAI({
  baseURL: process.argv[2], apiKey: "none", maxRetries: 0, timeout: 120000,
});

function ask(text, more = {}) {
  const messages = [{ role: "user", content: text }];
  return client.chat.completions.create({ model: MODEL, messages, temperature: 0, ...more });
}

async function collect(stream) {
  const all = { content: "", reasoning: "", calls: [], reasons: [], usage: null };
  for await (const chunk of stream) {
    all.usage = chunk.usage ?? all.usage;
    for (const choice of chunk.choices) {
      all.content += choice.delta.content ?? "";
      all.reasoning += choice.delta.reasoning_content ?? "";
      for (const part of choice.delta.tool_calls ?? []) {
        const call = (all.calls[part.index] ??= { name: "", arguments: "" });
        call.name += part.function.name ?? "";
        call.arguments += part.function.arguments ?? "";
      }
      if (choice.finish_reason) all.reasons.push(choice.finish_reason);
    }
  }
  return all;
}

const checks = {
  async check_models() {
    const ids = [];
    for await (const model of client.models.list()) ids.push(model.id);
    assert.ok(ids.includes(MODEL), ids.join());
    assert.equal((await client.models.retrieve(MODEL)).id, MODEL);
  },

  async check_chat() {
    const answer = await ask(`${FACTS}\n\nWhat is the code of the red vault in Oslo?`);
    assert.equal(answer.choices[0].message.content, "The code of the red vault in Oslo is 55231.");
    assert.equal(answer.choices[0].finish_reason, "stop");
    const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
    assert.equal(total_tokens, prompt_tokens + completion_tokens);
  },

  async check_stream() {
    const whole = await ask("Count from 3 to 12.");
    const options = { stream: true, stream_options: { include_usage: true } };
    const all = await collect(await ask("Count from 3 to 12.", options));
    assert.equal(all.content, whole.choices[0].message.content);
    assert.deepEqual(all.reasons, [whole.choices[0].finish_reason]);
    assert.equal(all.usage.completion_tokens, whole.usage.completion_tokens);
  },

  async check_tools_in_several_turns() {
    const answer = await ask(QUESTION, { tools: [WEATHER] });
    const [choice] = answer.choices;
    assert.equal(choice.finish_reason, "tool_calls");
    const [call] = choice.message.tool_calls;
    assert.equal(call.function.name, "get_weather");
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Lima", days: 3 });
    const result = { role: "tool", tool_call_id: call.id, content: '{"sky": "sunny", "celsius": 21}' };
    const messages = [{ role: "user", content: QUESTION }, choice.message, result];
    const final = await client.chat.completions.create({
      model: MODEL, messages, tools: [WEATHER], temperature: 0,
    });
    assert.equal(final.choices[0].message.content, "It is sunny in Lima, 21 degrees.");
  },

  async check_tools_in_a_stream() {
    const all = await collect(await ask(QUESTION, { tools: [WEATHER], stream: true }));
    assert.deepEqual(all.reasons, ["tool_calls"]);
    assert.equal(all.calls.length, 1);
    assert.deepEqual(JSON.parse(all.calls[0].arguments), { city: "Lima", days: 3 });
  },

  async check_strict_tools() {
    const parameters = { ...PARAMETERS, required: ["city", "days"], additionalProperties: false };
    const strict = { ...WEATHER, function: { ...WEATHER.function, parameters, strict: true } };
    const answer = await ask("Hi", { tools: [strict], tool_choice: "required", temperature: 1.2, seed: 3 });
    for (const call of answer.choices[0].message.tool_calls) {
      const found = JSON.parse(call.function.arguments);
      assert.equal(typeof found.city, "string");
      assert.ok(Number.isInteger(found.days));
    }
  },

  async check_structured_output() {
    const format = { type: "json_schema", json_schema: { name: "v", schema: VERDICT, strict: true } };
    const answer = await ask("Hi", { response_format: format, max_tokens: 100 });
    assert.equal(answer.choices[0].finish_reason, "stop");
    const verdict = JSON.parse(answer.choices[0].message.content);
    assert.deepEqual(Object.keys(verdict).sort(), ["ok", "word"]);
    assert.equal(typeof verdict.ok, "boolean");
    const all = await collect(await ask("Hi", { response_format: format, max_tokens: 100, stream: true }));
    assert.deepEqual(JSON.parse(all.content), verdict);
  },

  async check_thinking() {
    const question = `${FACTS}\n\nWhat is the code of the red vault in Oslo?`;
    const answer = await ask(question, { thinking: { type: "enabled" } });
    const { message } = answer.choices[0];
    assert.ok(message.reasoning_content.includes("55231"), message.reasoning_content);
    assert.ok(answer.usage.completion_tokens_details.reasoning_tokens > 0);
    const all = await collect(await ask(question, { thinking: { type: "enabled" }, stream: true }));
    assert.equal(all.reasoning, message.reasoning_content);
  },

  async check_several_answers() {
    const fields = { n: 2, temperature: 1.3, seed: 11, max_tokens: 16 };
    const [one, two] = [await ask("Tell me a joke.", fields), await ask("Tell me a joke.", fields)];
    const texts = (answer) => answer.choices.map((choice) => choice.message.content);
    assert.equal(texts(one).length, 2);
    assert.deepEqual(texts(one), texts(two));
  },

  async check_completions() {
    const fields = { model: MODEL, prompt: "The code of the red", max_tokens: 6, temperature: 0 };
    const answer = await client.completions.create(fields);
    let text = "";
    for await (const chunk of await client.completions.create({ ...fields, stream: true })) {
      text += chunk.choices[0].text;
    }
    assert.equal(text, answer.choices[0].text);
  },

  async check_errors() {
    const wrong = (more) => ask("Hi", more);
    await assert.rejects(wrong({ model: "gpt-9" }), OpenAI.NotFoundError);
    await assert.rejects(wrong({ temperature: 99 }), OpenAI.BadRequestError);
    const schema = { type: "object", properties: { a: { uniqueItems: true } } };
    const format = { type: "json_schema", json_schema: { name: "v", schema } };
    await assert.rejects(wrong({ response_format: format }), /uniqueItems/);
  },

  async check_responses_with_tools() {
    const { name, description } = WEATHER.function;
    const tools = [{ type: "function", name, description, parameters: PARAMETERS, strict: false }];
    const input = [{ role: "user", content: QUESTION }];
    const fields = { model: MODEL, tools, temperature: 0, store: false };
    const first = await client.responses.create({ ...fields, input });
    const call = first.output.find((item) => item.type === "function_call");
    assert.deepEqual(JSON.parse(call.arguments), { city: "Lima", days: 3 });
    const output = '{"sky": "sunny", "celsius": 21}';
    const next = [...input, ...first.output, { type: "function_call_output", call_id: call.call_id, output }];
    const second = await client.responses.create({ ...fields, input: next });
    assert.equal(second.output_text, "It is sunny in Lima, 21 degrees.");
  },

  async check_responses_structured_and_streamed() {
    const format = { type: "json_schema", name: "v", schema: VERDICT, strict: true };
    const fields = { model: MODEL, input: "Hi", text: { format }, temperature: 0, max_output_tokens: 100 };
    const whole = await client.responses.create(fields);
    assert.equal(typeof JSON.parse(whole.output_text).ok, "boolean");
    let text = "";
    for await (const event of await client.responses.create({ ...fields, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
  },
};

async function main() {
  for (const [name, check] of Object.entries(checks)) {
    try {
      await check();
    } catch (error) {
      console.log(`failed ${name}`);
      throw error;
    }
    console.log(`ok ${name}`);
  }
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
