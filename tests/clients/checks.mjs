// The same for Node's openai: `node checks.mjs URL MODEL EMBEDDING_MODEL`, with node_modules beside it or in NODE_PATH's place.
import { createRequire } from "node:module";
const require = createRequire(process.env.CLIENTS_NODE + "/");
const { OpenAI } = require("openai");

const [url, model, embeddingModel] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const messages = [{ role: "user", content: "Add 4991 and 6299." }];

function needs(condition, what) {
  if (!condition) throw new Error(what);
}

const checks = {
  chat: async () => {
    const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
    needs(answer.choices[0].message.content, "no text");
  },
  "chat, streamed": async () => {
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true })) {
      text += chunk.choices[0]?.delta?.content ?? "";
    }
    needs(text, "no text");
  },
  embeddings: async () => {
    const answer = await client.embeddings.create({ model: embeddingModel, input: ["a", "b"] });
    needs(answer.data.length === 2 && answer.data[0].embedding.length > 0, "no vectors");
  },
  responses: async () => {
    const answer = await client.responses.create({ model, input: "Add 4991 and 6299.", max_output_tokens: 8 });
    needs(answer.output_text, "no text");
  },
};

for (const [check, run] of Object.entries(checks)) {
  const started = Date.now();
  let failure = "";
  try {
    await run();
  } catch (error) {
    failure = `${error.name}: ${error.message}`.split("\n")[0].slice(0, 300);
  }
  console.log(JSON.stringify({ client: "openai (Node)", check, failure, seconds: (Date.now() - started) / 1000 }));
}
