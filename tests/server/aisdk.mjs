// A conversation through the AI SDK as anyclaude leads it: streamed, over chat completions, with
// tools that somebody else runs, and with its changes to each body; or, with the API "responses", as
// the SDK itself leads it. Prints the parts of each reply.
//
//     node aisdk.mjs http://127.0.0.1:8081/v1 chat|responses QUESTION...
import { createOpenAI } from "@ai-sdk/openai";
import { jsonSchema, streamText, tool } from "ai";

const [baseURL, api, ...questions] = process.argv.slice(2);
const provider = createOpenAI({
  baseURL,
  apiKey: "local",
  fetch: (url, init) => {
    const { max_tokens, reasoning, service_tier, ...body } = JSON.parse(init.body);
    if (max_tokens !== undefined) body.max_completion_tokens = max_tokens;
    if (api === "responses") return fetch(url, init);
    return fetch(url, {
      ...init,
      body: JSON.stringify({ ...body, parallel_tool_calls: false, cache_prompt: true }),
    });
  },
});

const read = tool({
  description: "Reads a file.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { path: { type: "string" }, lines: { type: "array", items: { type: "number" } } },
    required: ["path"],
  }),
});

const messages = [];
while (questions.length > 0 || messages.at(-1).role === "tool") {
  if (messages.at(-1)?.role !== "tool") messages.push({ role: "user", content: questions.shift() });
  const reply = streamText({
    model: api === "chat" ? provider.chat("current-model") : provider("current-model"),
    system: "Be brief. ".repeat(60),
    messages,
    tools: { read },
    maxOutputTokens: 200,
    maxRetries: 0,
  });
  const parts = [];
  for await (const part of reply.fullStream) parts.push(part);
  const { inputTokens, cachedInputTokens, inputTokenDetails } = await reply.usage;
  const fed = inputTokens - (cachedInputTokens ?? inputTokenDetails.cacheReadTokens);
  console.log(JSON.stringify({ parts, fed, reason: await reply.finishReason }));
  const calls = await reply.toolCalls;
  messages.push(...(await reply.response).messages);
  if (calls.length === 0) continue;
  messages.push({
    role: "tool",
    content: calls.map(({ toolCallId, toolName }) => ({
      type: "tool-result",
      toolCallId,
      toolName,
      output: { type: "text", value: "alpha" },
    })),
  });
}
