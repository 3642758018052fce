// A conversation through the AI SDK as anyclaude leads it: streamed, over chat completions, with
// tools that somebody else runs, and with its changes to each body; or, with another API, as the SDK
// itself leads it. Prints the parts of each reply.
//
//     node aisdk.mjs http://127.0.0.1:8081/v1 chat|responses|compatible|messages QUESTION...
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { jsonSchema, streamText, tool } from "ai";

const [baseURL, api, ...questions] = process.argv.slice(2);
const at = { name: "local", baseURL, apiKey: "local", includeUsage: true };
const anyclaude = {
  ...at,
  fetch: (url, init) => {
    const { max_tokens, reasoning, service_tier, ...body } = JSON.parse(init.body);
    if (max_tokens !== undefined) body.max_completion_tokens = max_tokens;
    return fetch(url, {
      ...init,
      body: JSON.stringify({ ...body, parallel_tool_calls: false, cache_prompt: true }),
    });
  },
};
const model = {
  chat: () => createOpenAI(anyclaude).chat("current-model"),
  responses: () => createOpenAI(at)("current-model"),
  compatible: () => createOpenAICompatible(at)("current-model"),
  messages: () => createAnthropic(at)("current-model"),
}[api]();

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
    model,
    system: `Be brief, ${api}. `.repeat(60), // each API is cold at first
    messages,
    tools: { read },
    maxOutputTokens: 200,
    maxRetries: 0,
  });
  const parts = [];
  for await (const part of reply.fullStream) parts.push(part);
  const { cachedInputTokens, inputTokenDetails } = await reply.usage;
  const cached = cachedInputTokens ?? inputTokenDetails.cacheReadTokens;
  console.log(JSON.stringify({ parts, cached, reason: await reply.finishReason }));
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
