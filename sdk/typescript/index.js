// Durable workers for Lanekeeper. index.d.ts has the documentation.
import { randomUUID } from "node:crypto";
import { setMaxListeners } from "node:events";
import { hostname } from "node:os";
import { setTimeout as pause } from "node:timers/promises";
import { Worker as Thread } from "node:worker_threads";

const environment = process.env;

/** The server's limit. It may close the connection of a much larger body, as a server that is away does. */
const maxBody = 1 << 20;

export class FlowError extends Error {
  constructor(id, status, message) {
    super(`execution ${id}: ${status}: ${message}`);
    this.id = id;
    this.status = status;
  }
}

export class ResultError extends Error {
  constructor(id) {
    super(`execution ${id} completed, but its result has more than 64 KiB, contains a secret, or needs the scope ` +
      "threads:read");
    this.id = id;
  }
}

export class TimeoutError extends Error {}

/** Marks the errors that stop a run, and the listener onRejection, in each copy of this package. */
const stopMark = Symbol.for("lanekeeper.stop");

export class LostError extends Error {
  get [stopMark]() { return true; }
}

export class RequestError extends Error {
  constructor(status, detail, holder) {
    super(`${status}: ${detail}`);
    this.status = status;
    this.holder = holder;
  }
}

for (const [name, type] of Object.entries({ FlowError, ResultError, TimeoutError, LostError, RequestError })) {
  Object.defineProperty(type.prototype, "name", { value: name, configurable: true, writable: true });
}

export class Result {
  constructor(value, summary) {
    this.value = value;
    this.summary = summary;
  }
}

/** Suspended unwinds a flow. The run remembers it, so code that catches it does no harm. */
class Suspended extends Error {
  get [stopMark]() { return true; }
}

/** A connection to the server. Every request may be sent twice, so it is repeated while the server is away. */
class Connection {
  constructor({ url, token, log = console.error } = {}) {
    this.log = log;
    this.url = String(url ?? environment.AGENT_URL ?? "http://127.0.0.1:8080").replace(/\/+$/, "");
    if (!/^https?:\/\//i.test(this.url)) {
      throw new TypeError(`the URL ${this.url} does not begin with http:// or https://: pass url, or set AGENT_URL`);
    }
    this.token = (token ?? environment.AGENT_TOKEN ?? environment.AGENT_ADMIN_TOKEN ?? "").trim();
    if (!this.token) throw new TypeError("a token is missing: pass token, or set AGENT_TOKEN");
    if (!/^[ -~]+$/.test(this.token)) { // the errors of Headers would show the token
      throw new TypeError("the token has a line break or another character that is not printable ASCII");
    }
  }

  /**
   * signal ends the request; until ends its repetition.
   * @param {{body?: unknown, signal?: AbortSignal, until?: AbortSignal, headers?: Record<string, string>,
   *   seconds?: number}} [options]
   */
  async call(method, path, { body, signal, until = signal, headers, seconds = 15 } = {}) {
    const data = body === undefined ? undefined : JSON.stringify(body);
    if (data && Buffer.byteLength(data) > maxBody) {
      throw new RequestError(413, `the body is larger than ${maxBody} bytes`);
    }
    const fields = new Headers({ // throws for a text that no header has
      authorization: `Bearer ${this.token}`, "content-type": "application/json", ...headers,
    });
    for (let wait = 100; ; wait = Math.min(wait * 2, 5000)) {
      until?.throwIfAborted();
      let failure;
      const attempt = new AbortController();
      const abort = () => attempt.abort(signal?.reason);
      const timer = setTimeout(abort, seconds * 1000);
      signal?.addEventListener("abort", abort);
      try {
        const answer = await fetch(this.url + path, {
          method,
          headers: fields,
          body: data,
          signal: attempt.signal,
          redirect: "manual", // fetch would send a POST as a GET, and the token not at all
        });
        const text = await answer.text();
        if (answer.ok) return text ? JSON.parse(text) : undefined;
        if (answer.status < 400) {
          const place = answer.headers.get("location");
          throw new RequestError(answer.status,
            `the server redirects to ${place}: pass its address as url, or set AGENT_URL`);
        }
        if (answer.status < 500 && answer.status !== 408 && answer.status !== 429) throw problem(answer.status, text);
        failure = `status ${answer.status}`;
      } catch (error) {
        if (error instanceof RequestError) throw error;
        until?.throwIfAborted(); // else the server did not answer: again
        failure = error.cause?.message || error.cause?.code || error.message; // of several addresses: the code
      } finally {
        clearTimeout(timer);
        signal?.removeEventListener("abort", abort);
      }
      if (wait === 100) this.log(`the request to ${this.url} failed and is tried again: ${failure}`);
      await pause(wait / 2 + (wait / 2) * Math.random(), undefined, { signal: until });
    }
  }
}

function problem(status, text) {
  try {
    const { detail, title, holder } = JSON.parse(text);
    return new RequestError(status, detail ?? title ?? text, holder);
  } catch {
    return new RequestError(status, text.slice(0, 500));
  }
}

export class Client {
  #connection;

  constructor(options) {
    this.#connection = options instanceof Connection ? options : new Connection(options);
  }

  async start(flow, input = {}, { key, onLost, progressSeconds, threadId } = {}) {
    const external = flow === "external" || flow.startsWith("external:");
    const started = await this.#connection.call("POST", "/v1/executions", {
      headers: { "idempotency-key": key ?? randomUUID() },
      body: {
        flow, input, on_lost: onLost ?? (external ? "hand_on" : undefined), progress_seconds: progressSeconds,
        thread_id: threadId,
      },
    });
    return { id: started.id, traceId: started.trace_id };
  }

  async sendEvent(key, data = {}, { id } = {}) {
    await this.#connection.call("POST", "/v1/events", {
      body: { event: "EVENT_COMPLETED", key, data, id: id ?? randomUUID() },
    });
  }

  async result(id, { signal } = {}) {
    for (let wait = 50; ; wait = Math.min(wait * 1.5, 1000)) {
      const x = await this.#connection.call("GET", `/v1/executions/${encodeURIComponent(id)}`, { signal });
      if (x.status === "completed") {
        if (x.result_altered) throw new ResultError(id);
        return x.result;
      }
      if (["failed", "timeout", "cancelled"].includes(x.status)) {
        throw new FlowError(id, x.status, x.error_message ?? x.cancel_reason ?? "");
      }
      await pause(wait, undefined, { signal });
    }
  }

  async cancel(id, reason) {
    await this.#connection.call("POST", `/v1/executions/${encodeURIComponent(id)}/cancel`, { body: { reason } });
  }
}

/** The server's text for a duration. */
function timeoutText(duration) {
  if (duration === undefined) return undefined;
  return typeof duration === "number" ? duration / 1000 : duration;
}

class Run {
  #connection;
  #lockId;
  #recorded;
  #counts = new Map();
  #used = new Set(); // the keys of the steps so far
  #waits = 0;
  #waiting = Promise.resolve();
  #abort = new AbortController();
  /** @type {Error | undefined} */
  #stopped;
  /** The steps that failed, by their errors. */
  failed = new Map();

  constructor(connection, lock) {
    this.#connection = connection;
    this.#lockId = lock.lock_id;
    this.#recorded = lock.checkpoints;
    this.id = lock.execution.id;
    this.traceId = lock.execution.trace_id;
    this.signal = this.#abort.signal;
    setMaxListeners(0, this.signal); // each of many steps at once listens
  }

  get lockId() { return this.#lockId; }

  /** The error that ended this worker's part; undefined while the run is its own. */
  get stopped() { return this.#stopped; }

  /** Ends this worker's part of the run. */
  stop(error) {
    this.#stopped ??= error;
    this.#abort.abort(this.#stopped);
    return this.#stopped;
  }

  #checkOwn() {
    if (this.#stopped) throw this.#stopped;
  }

  async #call(method, path, options) {
    try {
      return await this.#connection.call(method, `/v1/executions/${this.id}${path}`, options);
    } catch (error) {
      this.#checkOwn();
      if (error instanceof RequestError && error.status === 409) throw this.stop(new LostError(error.message));
      if (error instanceof RequestError && error.status === 404) throw this.stop(new LostError(error.message));
      throw error;
    }
  }

  async step(name, work) {
    this.#checkOwn();
    let step, count = this.#counts.get(name) ?? 0;
    do step = ++count === 1 ? name : `${name} #${count}`; while (this.#used.has(step));
    this.#counts.set(name, count);
    this.#used.add(step);
    if (Object.hasOwn(this.#recorded, step)) return this.#recorded[step];
    try {
      // Later runs get the record, so this one gets it too: for example, a Date becomes text.
      const output = JSON.parse(JSON.stringify(await work({ key: `${this.id} ${step}`, signal: this.signal })) ?? "null");
      this.#checkOwn();
      await this.#call("POST", "/checkpoints", { body: { lock_id: this.#lockId, step, output }, signal: this.signal });
      return this.#recorded[step] = output;
    } catch (error) {
      if (!this.failed.has(error)) this.failed.set(error, step);
      throw error;
    }
  }

  async waitForEvent(key, { timeout } = {}) {
    const outcome = await this.#wait("event", key, timeout);
    if (outcome.timed_out) throw new TimeoutError(`the wait for event ${key} timed out`);
    return outcome.data;
  }

  async sleep(duration) {
    if (typeof duration === "number") duration = Math.max(duration, 1); // the server requires more than 0
    await this.#wait("delay", undefined, duration);
  }

  /** Waits in the order of the calls: the server numbers the waits of a run, and the flow may begin several at once. */
  async #wait(kind, key, timeout) {
    const step = `wait ${kind} ${++this.#waits}`, earlier = this.#waiting;
    let done;
    this.#waiting = new Promise((resolve) => { done = resolve; });
    try {
      await earlier;
      this.#checkOwn();
      const outcome = this.#recorded[step];
      if (outcome !== undefined) return outcome;
      await this.#call("POST", `/lock/${this.#lockId}`, {
        body: { status: "waiting", waiting_for: kind, waiting_key: key, timeout: timeoutText(timeout) },
        signal: this.signal,
      });
      throw this.stop(new Suspended("the flow waits, and goes on in a later run"));
    } finally {
      done();
    }
  }

  /** Ends the execution. */
  async end(body) {
    await this.#call("POST", `/lock/${this.#lockId}`, { body, signal: this.signal });
  }
}

/** The step, type and text of an error. Its own methods may fail, and the server does not store NUL. */
function errorText(error, step) {
  let text = "unknown error";
  try {
    text = String(error?.message || error || text);
    if (error instanceof Error && error.message && error.name !== "Error") text = `${error.name}: ${text}`;
  } catch {}
  if (step !== undefined) text = `step ${step}: ${text}`;
  return text.slice(0, 10_000).replaceAll("\0", "\ufffd");
}

/** Where an error came from, in lines of their own. */
function stackOf(error) {
  try {
    const at = error.stack.indexOf("\n    at ");
    return at < 0 ? "" : error.stack.slice(at, at + 10_000);
  } catch {
    return "";
  }
}

/**
 * A flow may leave promises behind that reject when its run stops. Without this listener, the cancel of an execution
 * could end the process with all others. Another rejection ends it, unless the program has a listener of its own.
 */
function onRejection(reason) {
  if (reason?.[stopMark] || reason?.cause?.[stopMark]) return;
  if (process.listeners("unhandledRejection").every((listener) => listener[stopMark])) throw reason;
}
onRejection[stopMark] = true;

/** Workers whose runs have not all ended. */
let working = 0;

function listen() {
  const flags = [environment.NODE_OPTIONS, ...process.execArgv].join(" ");
  const mode = [...flags.matchAll(/--unhandled-rejections[= ]([a-z-]+)/g)].at(-1)?.[1] ?? "throw";
  // In other modes a rejection does not end the process, or ends it before the listeners are called.
  if (working++ === 0 && mode === "throw") process.on("unhandledRejection", onRejection);
}

function unlisten() {
  if (--working === 0) process.off("unhandledRejection", onRejection);
}

/** A line for people. */
function summaryOf(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value) ?? "";
  return [...text].length > 200 ? [...text].slice(0, 199).join("") + "…" : text;
}

export class Worker {
  #connection;
  #flows = new Map();
  #runs = new Map();
  #running = false;
  #owner;
  #ttl;
  #log;

  constructor({ url, token, owner, ttlSeconds = 30, log = console.error } = {}) {
    this.#connection = new Connection({ url, token, log });
    this.client = new Client(this.#connection);
    this.#owner = owner ?? `${hostname()} ${process.pid} ${randomUUID()}`;
    this.#ttl = ttlSeconds;
    this.#log = log;
  }

  flow(name, handler) {
    if (name !== "external" && !name.startsWith("external:")) {
      throw new TypeError(`flow ${name}: a worker's flows are external or external:NAME`);
    }
    if (typeof handler !== "function") throw new TypeError(`flow ${name}: a function is required`);
    if (this.#flows.has(name)) throw new TypeError(`flow ${name}: the name is registered already`);
    this.#flows.set(name, handler);
  }

  async start({ concurrency = 4, signal, graceSeconds = 20 } = {}) {
    if (this.#flows.size === 0) throw new TypeError("register a flow before start");
    if (!(concurrency >= 1 && concurrency <= 1000)) {
      throw new RangeError(`concurrency ${concurrency}: use 1 to 1000, and more workers for more`);
    }
    if (this.#running) throw new Error("this worker runs already");
    this.#running = true;
    listen();
    const heart = new Thread(new URL("./beat.js", import.meta.url), {
      workerData: { url: this.#connection.url, token: this.#connection.token, every: Math.floor((this.#ttl * 1000) / 3) },
    });
    heart.on("message", (message) => {
      if (typeof message === "string") this.#log(`locks not renewed; the next beat tries again: ${message}`);
      else this.#onBeat(message);
    });
    const running = new Set();
    try {
      while (!signal?.aborted) {
        for (const lock of await this.#claim(concurrency - running.size, signal)) {
          const run = new Run(this.#connection, lock);
          this.#runs.set(run.lockId, run);
          heart.postMessage([...this.#runs.keys()]);
          const done = this.#execute(run, lock.execution).finally(() => {
            this.#runs.delete(run.lockId);
            heart.postMessage([...this.#runs.keys()]);
            running.delete(done);
          });
          running.add(done);
        }
        if (running.size >= concurrency) await untilFree(running, signal);
      }
    } finally {
      const ended = Promise.all(running);
      await Promise.race([ended, pause(graceSeconds * 1000, undefined, { ref: false })]);
      for (const run of this.#runs.values()) run.stop(new LostError("the worker stops; another continues the run"));
      await heart.terminate();
      this.#running = false;
      ended.then(unlisten);
    }
  }

  /** Claims up to max executions, or waits for one. A claim is not aborted: the server may have locked executions. */
  async #claim(max, signal) {
    if (max <= 0) return [];
    try {
      const { locks } = await this.#connection.call("POST", "/v1/locks", {
        body: {
          flows: [...this.#flows.keys()], owner: this.#owner, ttl_seconds: this.#ttl, max: Math.min(max, 100),
          wait_seconds: 5, lock_ids: [...this.#runs.keys()],
        },
        until: signal, seconds: 20,
      });
      return locks;
    } catch (error) {
      if (signal?.aborted) return [];
      throw error;
    }
  }

  #onBeat(locks) {
    for (const { lock_id: id, live, cancel_requested: cancelled } of locks) {
      const run = this.#runs.get(id);
      if (run && cancelled) run.stop(new LostError("the execution was cancelled"));
      else if (run && !live) run.stop(new LostError("the lock expired; another worker may continue the run"));
    }
  }

  async #execute(run, execution) {
    let body, stack = "";
    try {
      const result = await this.#flows.get(execution.flow)(execution.input, run);
      const { value, summary } = result instanceof Result ? result : { value: result, summary: summaryOf(result) };
      body = { status: "completed", result: value ?? null, result_summary: summary };
    } catch (error) {
      body = { status: "failed", error_message: errorText(error, run.failed.get(error)) };
      stack = stackOf(error);
    }
    try {
      if (!run.stopped) {
        await run.end(body).catch((error) => { // the server cannot store this end; without one the flow would run again
          if (run.stopped) throw error;
          body = { status: "failed", error_message: `the end of the flow was refused: ${error.message}` };
          return run.end(body);
        });
      }
    } catch (error) {
      if (!run.stopped) {
        this.#log(`execution ${run.id}: its end was refused: ${error.message}`);
        return;
      }
    }
    if (run.stopped instanceof Suspended) this.#log(`execution ${run.id}: waits`);
    else if (run.stopped) this.#log(`execution ${run.id}: stopped here: ${run.stopped.message}`);
    else this.#log(`execution ${run.id}: ${body.status}${body.error_message ? `: ${body.error_message}` : ""}${stack}`);
  }
}

/** Waits until one of the runs has ended, or signal aborts. */
async function untilFree(running, signal) {
  if (!signal) return Promise.race(running);
  let stop;
  const aborted = new Promise((resolve) => signal.addEventListener("abort", stop = resolve, { once: true }));
  try {
    await Promise.race([...running, aborted]);
  } finally {
    signal.removeEventListener("abort", stop);
  }
}
