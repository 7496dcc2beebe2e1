// The scenario of the SDK tests, in TypeScript's SDK. It appends each effect to the file EFFECTS.
import { appendFileSync } from "node:fs";
import { setTimeout as pause } from "node:timers/promises";
import { LostError, Result, ResultError, TimeoutError, Worker } from "../../sdk/typescript/index.js";

const worker = new Worker({ owner: process.env.OWNER, ttlSeconds: Number(process.env.TTL_SECONDS ?? 30) });
const effect = (line) => appendFileSync(process.env.EFFECTS, line + "\n");

worker.flow("external:scenario", async (input, run) => {
  let sum = 0;
  for (let n = 1; n <= input.steps; n++) {
    sum = await run.step("add", async ({ key, signal }) => {
      effect(`add ${n} ${key}`);
      try {
        await pause(input.pause_ms, undefined, { signal });
      } catch {
        effect(`aborted ${n}`);
      }
      return sum + n;
    });
  }
  if (input.event) {
    try {
      sum += (await run.waitForEvent(input.event, { timeout: input.timeout })).amount;
    } catch (error) {
      if (!(error instanceof TimeoutError)) throw error;
      sum = -1;
    }
  }
  if (input.sleep !== undefined) await run.sleep(input.sleep);
  if (input.fail) throw new Error(input.fail);
  return new Result({ sum }, `the sum is ${sum}`);
});

// A flow that swallows every error does no harm.
worker.flow("external:careless", async (input, run) => {
  try {
    await run.waitForEvent(input.event);
  } catch {
    effect("swallowed");
  }
  await run.step("after", () => effect("after")).catch((error) => effect(`refused ${error instanceof LostError}`));
  return "done";
});

// Ends that are hard to record.
worker.flow("external:odd", (input) => {
  switch (input.end) {
    case "error without text": throw { get message() { throw new Error("no text"); } };
    case "error of nothing": throw undefined;
    case "error with NUL": throw new Error("a\0b");
    case "huge error": throw new Error("x".repeat(3 << 20));
    case "stopped": throw new LostError("it was lost");
    case "infinity": throw new Error("JSON.stringify makes it null");
    case "value": return new Result(1n, "a number");
    case "summary": return new Result(1, {});
    case "key": return worker.client.start("external:scenario", {}, { key: "\u2713" });
  }
});

worker.flow("external:json", async (input, run) => {
  const read = async () => JSON.stringify([
    await run.step("date", () => new Date(0)), await run.step("number", () => Number.NaN),
    await run.step("nothing", () => {}),
  ].map((value) => [typeof value, value]));
  const first = await run.step("first", read);
  await run.sleep("1s");
  return `${first === await read()} ${first}`;
});

// A name that looks like the key of a repeated step.
worker.flow("external:names", async (input, run) => {
  const keys = [];
  for (const name of ["item #2", "item", "item", "item"]) keys.push(await run.step(name, ({ key }) => key.slice(37)));
  return keys.join(", ");
});

// Several waits at once.
worker.flow("external:waits", async (input, run) => {
  const got = await Promise.all([run.waitForEvent(`${input.key} 1`), run.waitForEvent(`${input.key} 2`)]);
  return got.join(", ");
});

// A promise that rejects while the flow waits for another.
worker.flow("external:parallel", async (input, run) => {
  const abort = (signal) => new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
  const charge = async () => run.step("charge", ({ signal }) => abort(signal));
  const charged = charge();
  await run.step("ship", ({ signal }) => { effect("ship"); return abort(signal); });
  return charged;
});

worker.flow("external:again", async () => { await worker.start(); });

worker.flow("external:huge", () => "x".repeat(12 << 20));
worker.flow("external:long", () => "x".repeat(100 << 10));
worker.flow("external:reader", async (input, run) => {
  const { id } = await worker.client.start("external:long", {}, { key: run.id });
  try {
    return await worker.client.result(id);
  } catch (error) {
    if (!(error instanceof ResultError)) throw error;
    return new Result(error.id, error.message);
  }
});
worker.flow("external:no-json", (input, run) => run.step("no json", () => 1n));
worker.flow("external:exit", () => { throw "it gives up"; });

worker.flow("external:broken", async (input, run) => {
  const in_broken_function = () => { throw new RangeError("it is missing"); };
  if (input.step) await run.step("read", in_broken_function);
  await run.step("other", in_broken_function).catch(() => {});
  in_broken_function();
});

worker.flow("external:register", () => {
  const errors = [];
  for (const [name, handler] of [["external:twice", 5], ["external:twice", () => {}], ["external:twice", () => {}]]) {
    try {
      worker.flow(name, handler);
    } catch (error) {
      errors.push(error.message);
    }
  }
  return errors.join("; ");
});

worker.flow("external:many", async (input, run) => {
  const steps = Array.from({ length: 20 }, (_, n) => run.step(`step ${n}`, async () => n));
  return `${(await Promise.all(steps)).length} steps`;
});

// What a client does besides, from within a step.
worker.flow("external:client", (input, run) => run.step("client", async ({ key }) => {
  const { client } = worker;
  const options = { key, onLost: "fail", progressSeconds: 60 };
  const first = await client.start("external:scenario", { steps: 1, pause_ms: 0, event: key, sleep: "1s" }, options);
  await client.sendEvent(key, { amount: 41 }, { id: key });
  const { sum } = await client.result(first.id);
  const second = await client.start("external:scenario", { steps: 0, event: `never ${key}` }, { threadId: `of ${key}` });
  await client.cancel(second.id, "not needed");
  const ended = await client.result(second.id).catch((error) => error);
  const refused = await client.result("00000000-0000-7000-8000-000000000000").catch((error) => error);
  return `${sum}, then ${ended.message.split(": ").slice(1).join(": ")}, then ${refused.status}`;
}));

const stop = new AbortController();
process.on("SIGTERM", () => stop.abort());
await worker.start({
  concurrency: Number(process.env.CONCURRENCY ?? 8), signal: stop.signal,
  graceSeconds: Number(process.env.GRACE_SECONDS ?? 20),
});
