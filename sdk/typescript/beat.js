// The heartbeat: a thread of its own, so that a busy flow does not lose its locks.
import { parentPort, workerData } from "node:worker_threads";

const { url, token, every } = workerData;
let pause = every;
/** @type {string[]} */
let locks = [];
parentPort?.on("message", (ids) => { locks = ids; });

async function beat() {
  let failure, lost = false;
  if (locks.length > 0) {
    try {
      const answer = await fetch(`${url}/v1/locks`, {
        method: "PUT",
        headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
        body: JSON.stringify({ lock_ids: locks }),
        signal: AbortSignal.timeout(every),
        redirect: "manual",
      });
      lost = answer.status >= 500; // after another refusal, an early beat would get the same answer
      if (answer.ok) parentPort?.postMessage((await answer.json()).locks);
      else failure = `status ${answer.status}`;
    } catch (error) {
      lost = true; // a lock ends three beats after its renewal
      failure = error.cause?.message || error.cause?.code || error.message;
    }
  }
  if (failure && pause === every) parentPort?.postMessage(failure);
  pause = lost ? every / 10 : every;
  setTimeout(beat, pause);
}
setTimeout(beat, pause);
