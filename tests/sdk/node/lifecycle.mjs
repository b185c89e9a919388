// The official Node SDK: upload → create → poll → download → list, by OpenAI and by AzureOpenAI.
// Usage: node lifecycle.mjs PACKAGE ROOT KEY FILE; prints one JSON object for each client.
import fs from "node:fs";
import assert from "node:assert/strict";
import { setTimeout as sleep } from "node:timers/promises";

const [library, root, apiKey, path] = process.argv.slice(2);
const { default: OpenAI, AzureOpenAI, toFile } = await import(library);
const clients = {
  openai: new OpenAI({ baseURL: `${root}/v1`, apiKey }),
  azure: new AzureOpenAI({ endpoint: root, apiKey, apiVersion: "2025-04-01-preview" }),
  "azure-deployment": new AzureOpenAI({
    endpoint: root,
    apiKey,
    apiVersion: "2025-04-01-preview",
    deployment: "echo",
  }),
};
const ended = new Set(["completed", "failed", "expired", "cancelled"]);

for (const [name, client] of Object.entries(clients)) {
  const file = await client.files.create({ file: fs.createReadStream(path), purpose: "batch" });
  assert.equal(file.bytes, fs.statSync(path).size);
  assert.equal((await client.files.retrieve(file.id)).id, file.id);

  // In memory it is sent with its length, as a stream in chunks.
  const bytes = fs.readFileSync(path);
  const held = await client.files.create({ file: await toFile(bytes, "in.jsonl"), purpose: "batch" });
  const back = await (await client.files.content(held.id)).arrayBuffer();
  assert.ok(bytes.equals(Buffer.from(back)));

  let batch = await client.batches.create({
    input_file_id: file.id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
    metadata: { client: name },
  });
  const deadline = Date.now() + 120_000;
  while (!ended.has(batch.status)) {
    assert.ok(Date.now() < deadline, `${batch.id} is still ${batch.status}`);
    await sleep(20);
    batch = await client.batches.retrieve(batch.id);
  }

  const text = await (await client.files.content(batch.output_file_id)).text();
  const rows = text.split("\n").filter(Boolean).map((row) => JSON.parse(row));

  const listed = [];
  for await (const found of client.batches.list({ limit: 1 })) listed.push(found.id);
  assert.ok(listed.includes(batch.id));
  assert.equal(new Set(listed).size, listed.length);

  let refused = null;
  try {
    await client.batches.cancel(batch.id);
  } catch (error) {
    assert.ok(error instanceof OpenAI.ConflictError);
    refused = { status: error.status, code: error.code, requestID: error.requestID };
  }
  const gone = await client.files.delete(file.id);
  const answers = Object.fromEntries(
    rows.map((row) => [row.custom_id, row.response.body.choices[0].message.content]),
  );
  console.log(JSON.stringify({ name, status: batch.status, answers, refused, deleted: gone.deleted }));
}
