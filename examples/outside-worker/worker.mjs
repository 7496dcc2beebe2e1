// A worker outside of Lanekeeper, in plain Node (18 or later), without any library.
//
//   AGENT_URL=http://127.0.0.1:8080 AGENT_ADMIN_TOKEN=… node worker.mjs EXECUTION_ID [STEPS] [PAUSE_MS]
//
// It locks the execution, goes on after the last recorded step, beats every 15 seconds beside the work, and ends the run.
// Each step is done only when it is not recorded yet, so a worker that is killed loses at most the step it was in. Any 409
// means that the run is no longer this worker's: it stops at once.

import { randomUUID } from "node:crypto";
import { hostname } from "node:os";
import { setTimeout as pause } from "node:timers/promises";

const [id, steps = "5", each = "1000"] = process.argv.slice(2);
const base = process.env.AGENT_URL ?? "http://127.0.0.1:8080";
const owner = process.env.WORKER ?? `${hostname()} ${process.pid} ${randomUUID()}`; // one process, never two
const ttl = Number(process.env.TTL_SECONDS ?? 30);

// call sends one request. After a broken connection, or an answer of a busy server, it sends the request again: each of
// these requests may be sent twice. (A release that is repeated after it was done gets 409: the run has ended.)
async function call(method, path, body) {
  for (let wait = 100; ; wait = Math.min(wait * 2, 5000)) {
    try {
      const answer = await fetch(base + path, {
        method,
        headers: { authorization: `Bearer ${process.env.AGENT_ADMIN_TOKEN}`, "content-type": "application/json" },
        body: body === undefined ? undefined : JSON.stringify(body),
        signal: AbortSignal.timeout(10_000),
      });
      if (answer.status < 500 && answer.status !== 408 && answer.status !== 429) return { status: answer.status, body: await answer.json() };
    } catch (error) {
      if (!(error instanceof TypeError) && error.name !== "TimeoutError") throw error;
    }
    await pause(wait);
  }
}

// must stops the worker at a refusal.
function must(what, answer) {
  if (answer.status < 300) return answer.body;
  console.log(`${what}: ${answer.status} ${answer.body.detail}`);
  process.exit(answer.status === 409 ? 9 : 1);
}

const run = must("lock", await call("POST", `/v1/executions/${id}/lock`, { owner, ttl_seconds: ttl }));
const recorded = run.checkpoints;
console.log(`locked with ${Object.keys(recorded).length} steps recorded`);

// The heartbeat has a request of its own, so it never waits for a checkpoint. The lock is in its path: do not log it.
let over = false;
async function beat() {
  await pause((ttl * 1000) / 2, undefined, { ref: false });
  if (over) return;
  const answer = await call("PUT", `/v1/executions/${id}/lock/${run.lock_id}`);
  if (over) return;
  if (must("beat", answer).cancel_requested) {
    console.log("cancelled");
    process.exit(9);
  }
  beat();
}
beat();

// step does some work once: what is recorded is not done again.
async function step(name, work) {
  if (!(name in recorded)) {
    const output = await work();
    must("checkpoint", await call("POST", `/v1/executions/${id}/checkpoints`, { lock_id: run.lock_id, step: name, output }));
    recorded[name] = output;
    console.log(`recorded ${name}`);
  }
  return recorded[name];
}

let sum = run.execution.input.start ?? 0;
for (let n = 1; n <= Number(steps); n++) {
  sum = await step(`add ${n}`, async () => {
    await pause(Number(each));
    return sum + n;
  });
}

over = true;
must("release", await call("DELETE", `/v1/executions/${id}/lock/${run.lock_id}`, { status: "completed", result_summary: `the sum is ${sum}` }));
console.log(`completed: ${sum}`);
