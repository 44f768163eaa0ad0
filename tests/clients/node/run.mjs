// Drives the `openai` package of npm: targets in on standard input, a line of JSON out for each feature.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { readFileSync } from "node:fs";
import assert from "node:assert/strict";
import { z } from "zod";

const QUESTION = "What is 1 + 2?";
const ASK = [{ role: "user", content: QUESTION }];
const Sum = z.object({ sum: z.int() });
const ADD = zodFunction({
  name: "add",
  description: "Add two numbers.",
  parameters: z.object({ a: z.int(), b: z.int() }),
  function: ({ a, b }) => String(a + b),
});

const features = {
  async chat(client, model) {
    const answer = await client.chat.completions.create({ model, messages: ASK });
    assert.ok(answer.choices[0].message.content);
  },
  async stream(client, model) {
    const stream = client.chat.completions.stream({ model, messages: ASK });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
    assert.equal((await stream.finalChatCompletion()).choices[0].message.content, text);
  },
  async parse(client, model) {
    const response_format = zodResponseFormat(Sum, "sum");
    const answer = await client.chat.completions.parse({ model, messages: ASK, response_format });
    assert.equal(typeof answer.choices[0].message.parsed.sum, "number");
  },
  async run_tools(client, model) {
    const runner = client.chat.completions.runTools({ model, messages: ASK, tools: [ADD] });
    assert.ok(await runner.finalContent());
  },
  async responses(client, model) {
    const text = { format: zodTextFormat(Sum, "sum") };
    const answer = await client.responses.parse({ model, input: QUESTION, text });
    assert.equal(typeof answer.output_parsed.sum, "number");
  },
};

for (const [feature, sides] of Object.entries(JSON.parse(readFileSync(0, "utf8")))) {
  for (const [side, target] of Object.entries(sides)) {
    const client = new OpenAI({ baseURL: target.base_url, apiKey: target.api_key, maxRetries: 0 });
    let error = null;
    try {
      await features[feature](client, target.model);
    } catch (failure) {
      error = String(failure.stack ?? failure);
    }
    console.log(JSON.stringify({ feature, side, error }));
  }
}
