/** Where the server is, and who calls. */
export interface ConnectionOptions {
  /** The server's address; default `AGENT_URL`, else http://127.0.0.1:8080. */
  url?: string | URL;
  /** A token of the server; default `AGENT_TOKEN`, else `AGENT_ADMIN_TOKEN`. */
  token?: string;
  /**
   * Receives a line when the server does not answer, and for each event of a worker; default `console.error`. The stack
   * of a flow's error follows in lines of its own.
   */
  log?: (line: string) => void;
}

export interface StartOptions {
  /** An idempotency key: starts with the same key, flow and input return the first execution. */
  key?: string;
  /** The effect of a lost worker: another continues (`hand_on`, the default), or the execution fails. */
  onLost?: "hand_on" | "fail";
  /** Ends the execution if its worker records no step for so many seconds. */
  progressSeconds?: number;
  threadId?: string;
}

export interface Started {
  id: string;
  traceId: string;
}

/** Starts executions, sends events, and reads results. Requests are repeated while the server is away. */
export class Client {
  constructor(options?: ConnectionOptions);
  /** Starts an execution. It is durable when the promise resolves. */
  start(flow: string, input?: unknown, options?: StartOptions): Promise<Started>;
  /** Sends an event to the flow that waits for `key`; without one, it is kept for the first. The same `id` counts once. */
  sendEvent(key: string, data?: unknown, options?: { id?: string }): Promise<void>;
  /**
   * Waits for the end of an execution, and resolves to its result of at most 64 KiB. Rejects with a FlowError unless it
   * completed, and with a ResultError if the server does not show the result as the flow returned it.
   */
  result<Out = unknown>(id: string, options?: { signal?: AbortSignal }): Promise<Out>;
  cancel(id: string, reason: string): Promise<void>;
}

export interface StepContext {
  /** The idempotency key of the step: the same in every attempt, and unique to it. Give it to what the step calls. */
  key: string;
  /** Aborts when the execution is cancelled or the lock is lost. Pass it on, so that the work really stops. */
  signal: AbortSignal;
}

/** A number of milliseconds, or text such as "90s", "24h" or "7d". */
export type Duration = number | string;

/** The execution that a flow runs. */
export interface Run {
  readonly id: string;
  readonly traceId: string;
  /** Aborts when the execution is cancelled or the lock is lost. */
  readonly signal: AbortSignal;
  /**
   * Calls `work` once, records its result as JSON, and resolves to that record, as in later runs of the flow: a Date is
   * text.
   */
  step<T>(name: string, work: (step: StepContext) => Promise<T> | T): Promise<T>;
  /**
   * Suspends the flow until an event with `key` comes. The promise does not resolve in this run: the flow starts again,
   * and goes on here. Waits that a flow begins at once come one after the other. Rejects with a TimeoutError after
   * `timeout` (7 days by default, 30 at most).
   */
  waitForEvent<T = unknown>(key: string, options?: { timeout?: Duration }): Promise<T>;
  /** Suspends the flow for a time, at most 30 days. 0 or less is a moment. */
  sleep(duration: Duration): Promise<void>;
}

/** The result of a flow with a summary for people. */
export class Result<Out> {
  readonly value: Out;
  readonly summary: string;
  constructor(value: Out, summary: string);
}

export type Handler<In, Out> = (input: In, run: Run) => Promise<Out | Result<Out>> | Out | Result<Out>;

export interface WorkerOptions extends ConnectionOptions {
  /** Names this process; it must be unique. Default: host, process id and a random part. */
  owner?: string;
  /** How long the server waits for a dead worker; default 30. Locks are renewed three times as often. */
  ttlSeconds?: number;
}

/** Runs flows. */
export class Worker {
  constructor(options?: WorkerOptions);
  /** The client of this worker's connection. */
  readonly client: Client;
  /** Registers the function of a flow, `external` or `external:NAME`. */
  flow<In = any, Out = unknown>(name: string, handler: Handler<In, Out>): void;
  /**
   * Claims and runs up to `concurrency` executions (default 4, at most 1,000) until `signal` aborts. Then running flows
   * have `graceSeconds` (default 20) to end. Then their locks expire, as after a crash.
   */
  start(options?: { concurrency?: number; signal?: AbortSignal; graceSeconds?: number }): Promise<void>;
}

/** An execution that ended without a result. */
export class FlowError extends Error {
  readonly id: string;
  readonly status: "failed" | "timeout" | "cancelled";
}

/** An execution completed, but the server does not show its result as the flow returned it. */
export class ResultError extends Error {
  readonly id: string;
}

/** A wait whose time ended. */
export class TimeoutError extends Error {}

/** The server refused a request. */
export class RequestError extends Error {
  readonly status: number;
  readonly holder?: string;
}

/** The execution is no longer this worker's: it was cancelled, or another worker continues it. Stop the work. */
export class LostError extends Error {}
