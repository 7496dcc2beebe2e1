// The heartbeat: a thread of its own, so that a busy flow does not lose its locks.
import { parentPort, workerData } from "node:worker_threads";

const { url, token, every } = workerData;
/** @type {string[]} */
let locks = [];
parentPort?.on("message", (ids) => { locks = ids; });

async function beat() {
  const ids = locks;
  for (let first = 0; first < ids.length; first += 1000) { // the most that one request renews
    try {
      const answer = await fetch(`${url}/v1/locks`, {
        method: "PUT",
        headers: { authorization: `Bearer ${token}`, "content-type": "application/json" },
        body: JSON.stringify({ lock_ids: ids.slice(first, first + 1000) }),
        signal: AbortSignal.timeout(every * 2),
      });
      if (answer.ok) parentPort?.postMessage((await answer.json()).locks);
    } catch {
      // The next beat tries again; a lock that expires meanwhile is refused.
    }
  }
  setTimeout(beat, every);
}
setTimeout(beat, every);
