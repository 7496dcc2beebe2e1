import OpenAI from "openai";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, jsonSchema, streamObject, streamText } from "ai";
import { ChatOpenAI } from "@langchain/openai";
const baseURL = process.env.BASE, apiKey = "site", out = {};
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const first = await client.responses.create({ model: "agent", input: "I am Ada." });
out.first = first.output_text;
const stream = client.responses.stream({ model: "agent", input: "Who am I?", previous_response_id: first.id });
out.deltas = "";
stream.on("response.output_text.delta", (e) => { out.deltas += e.delta; });
const final = await stream.finalResponse();
out.final = final.output_text; out.previous = final.previous_response_id === first.id;
out.same = final.conversation.id === first.conversation.id;
const messages = [{ role: "user", content: "hello" }], named = (e) => e.constructor.name + " " + e.code;
out.whole = (await client.chat.completions.create({ model: "nora", messages })).choices[0].message.content;
out.text = ""; out.counted = out.keptAlive = false;
for await (const chunk of await client.chat.completions.create({ model: "agent", messages, stream: true, stream_options: { include_usage: true } })) {
  const choice = chunk.choices[0];
  if (choice && !choice.delta.content && !choice.delta.role && !choice.finish_reason) out.keptAlive = true;
  out.text += choice?.delta?.content ?? "";
  if (chunk.usage?.total_tokens > 0) out.counted = true;
}
out.models = (await client.models.list()).data.length;
try { await client.chat.completions.create({ model: "gpt-4o", messages }); } catch (e) { out.missing = named(e); }
try { await client.withOptions({ apiKey: "stranger" }).models.list(); } catch (e) { out.key = named(e); }
try { await client.chat.completions.create({ model: "agent", messages: [] }); } catch (e) { out.bad = e.constructor.name + " " + (e.requestID ?? "").slice(0, 3); }
try {
  for await (const _ of await client.chat.completions.create({ model: "agent", messages: [{ role: "user", content: "fail" }], stream: true }));
} catch (e) { out.middle = named(e); }
try { await client.responses.create({ model: "agent", input: "x", previous_response_id: first.id }); } catch (e) { out.stale = e.status + " " + e.code; }
try { await client.responses.create({ model: "agent", input: "x", tools: [{ type: "web_search" }] }); } catch (e) { out.tools = e.status + " " + e.param; }
const ai = createOpenAI({ baseURL, apiKey });
const one = await generateText({ model: ai("agent"), prompt: "Hi." });
out.ai = one.text;
const two = await generateText({ model: ai("agent"), messages: [{ role: "user", content: "Hi." }, ...one.response.messages, { role: "user", content: "Again." }] });
out.aiAgain = two.text;
out.aiStream = ""; for await (const t of streamText({ model: ai("agent"), prompt: "Hi." }).textStream) out.aiStream += t;
out.aiHeld = (await generateText({ model: ai("agent"), prompt: "On.", providerOptions: { openai: { previousResponseId: one.response.id } } })).text;
out.aiChat = (await generateText({ model: ai.chat("agent"), prompt: "Hi." })).text;
out.aiChatStream = ""; for await (const t of streamText({ model: ai.chat("agent"), prompt: "Hi." }).textStream) out.aiChatStream += t;
for (const useResponsesApi of [true, false]) {
  const lc = new ChatOpenAI({ model: "agent", apiKey, useResponsesApi, temperature: 0.5, configuration: { baseURL } });
  out["lc" + useResponsesApi] = (await lc.invoke("Hi.")).text;
  let s = ""; for await (const c of await lc.stream("Hi.")) s += c.text;
  out["lcStream" + useResponsesApi] = s;
}
const schema = { type: "object", properties: { population: { type: "integer" }, city: { type: "string" } }, required: ["population", "city"], additionalProperties: false };
const shown = (o) => o.city + " " + o.population, q = "Which city?";
const parsed = await client.chat.completions.parse({ model: "agent", messages: [{ role: "user", content: q }], response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema } } });
out.parsed = shown(JSON.parse(parsed.choices[0].message.content));
const held = await client.responses.create({ model: "agent", input: q, text: { format: { type: "json_schema", name: "city", strict: true, schema } } });
out.parsedResponse = shown(JSON.parse(held.output_text));
out.aiObject = shown((await generateObject({ model: ai("agent"), schema: jsonSchema(schema), prompt: q })).object);
out.aiChatObject = shown((await generateObject({ model: ai.chat("agent"), schema: jsonSchema(schema), prompt: q })).object);
let last; for await (const o of streamObject({ model: ai("agent"), schema: jsonSchema(schema), prompt: q }).partialObjectStream) last = o;
out.aiStreamObject = shown(last);
const lcs = new ChatOpenAI({ model: "agent", apiKey, configuration: { baseURL } }).withStructuredOutput(schema, { name: "city", method: "jsonSchema" });
out.lcObject = shown(await lcs.invoke(q));
console.log(JSON.stringify(out));
