"""The worker: claims executions, runs flows, renews locks."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition, Event, Lock, Thread
from typing import Any

from ._client import Client, Connection, RequestError, Stopped, read_json

log = logging.getLogger("lanekeeper")

Handler = Callable[[Any, "Run"], Any]


class Suspended(BaseException):
    """Unwinds a flow that waits. It is no Exception, so that `except Exception` does not catch it."""


class LostError(BaseException):
    """The execution is no longer this worker's: it was cancelled, or another worker continues it."""


class WaitTimeout(Exception):
    """A wait whose time ended."""


@dataclass(frozen=True)
class Result:
    """The result of a flow with a summary for people."""

    value: Any
    summary: str


@dataclass(frozen=True)
class Step:
    """What a step is called with."""

    key: str
    """The idempotency key: the same in every attempt, and unique to the step. Give it to what the step calls."""
    cancelled: Event
    """Set when the execution is cancelled or the lock is lost. Stop the work then."""


class Run:
    """The execution that a flow runs. One thread uses it."""

    def __init__(self, connection: Connection, lock: dict[str, Any]) -> None:
        self._connection = connection
        self.lock_id: str = lock["lock_id"]
        self._recorded: dict[str, Any] = lock["checkpoints"]
        self.id: str = lock["execution"]["id"]
        self.trace_id: str = lock["execution"]["trace_id"]
        self.cancelled = Event()
        self._counts: Counter[str] = Counter()
        self._used: set[str] = set()  # the keys of the steps so far
        self._waits = 0
        self._guard = Lock()
        self.stopped: BaseException | None = None
        self.failed: tuple[BaseException, str] | None = None  # the last error of a step, and the step

    def stop(self, error: BaseException) -> BaseException:
        """Ends this worker's part of the run. The first error counts."""
        with self._guard:
            self.stopped = self.stopped or error
        self.cancelled.set()
        return self.stopped

    def _check_own(self) -> None:
        if self.stopped is not None:
            raise self.stopped

    def _call(self, method: str, path: str, body: Any) -> Any:
        try:
            return self._connection.call(method, f"/v1/executions/{self.id}{path}", body, stop=self.cancelled)
        except Stopped:
            self._check_own()
            raise
        except RequestError as error:
            if error.status in (404, 409):
                raise self.stop(LostError(str(error))) from None
            raise

    def step(self, name: str, work: Callable[[Step], Any]) -> Any:
        """Calls work once and records its result, which is JSON. Later runs of the flow get the record."""
        self._check_own()
        step = None
        while step is None or step in self._used:
            self._counts[name] += 1
            count = self._counts[name]
            step = name if count == 1 else f"{name} #{count}"
        self._used.add(step)
        if step in self._recorded:
            return self._recorded[step]
        try:
            output = json.loads(json.dumps(work(Step(f"{self.id} {step}", self.cancelled)), allow_nan=False))
            self._check_own()
            self._call("POST", "/checkpoints", {"lock_id": self.lock_id, "step": step, "output": output})
        except BaseException as error:
            self.failed = self.failed if self.failed and self.failed[0] is error else (error, step)
            raise
        self._recorded[step] = output
        return output

    def wait_for_event(self, key: str, *, timeout: float | str | None = None) -> Any:
        """Suspends the flow until an event with key comes, and returns its data.

        The call does not return in this run: the flow starts again, and goes on here. timeout is a number of seconds, or
        text such as "90m" or "7d"; after it the call raises WaitTimeout. Without one it is 7 days.
        """
        outcome = self._wait("event", key, timeout)
        if outcome["timed_out"]:
            raise WaitTimeout(f"the wait for event {key} timed out")
        return outcome["data"]

    def sleep(self, duration: float | str) -> None:
        """Suspends the flow for a number of seconds, or text such as "24h"; at most 30 days. 0 or less is a moment."""
        if not isinstance(duration, str):
            duration = max(duration, 0.001)  # the server requires more than 0
        self._wait("delay", None, duration)

    def _wait(self, kind: str, key: str | None, timeout: float | str | None) -> Any:
        self._check_own()
        self._waits += 1
        outcome = self._recorded.get(f"wait {kind} {self._waits}")
        if outcome is not None:
            return outcome
        body = {"status": "waiting", "waiting_for": kind}
        if key is not None:
            body["waiting_key"] = key
        if timeout is not None:
            body["timeout"] = timeout  # type: ignore[assignment]
        self._call("POST", f"/lock/{self.lock_id}", body)
        raise self.stop(Suspended("the flow waits, and goes on in a later run"))

    def end(self, body: dict[str, Any]) -> None:
        """Ends the execution."""
        self._call("POST", f"/lock/{self.lock_id}", body)


def _error_text(error: BaseException, failed: tuple[BaseException, str] | None) -> str:
    """The step, type and text of an error. Its own method may fail, and the server stores neither NUL nor surrogates."""
    text = type(error).__name__
    try:
        text = f"{text}: {error}".removesuffix(": ")
    except BaseException:
        pass
    if failed is not None and failed[0] is error:
        text = f"step {failed[1]}: {text}"
    return text[:10_000].replace("\0", "\ufffd").encode(errors="replace").decode()


_TOO_DEEP = f"nested too deeply {uuid.uuid4()}"
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[{\]}]')


def _read_locks(text: bytes) -> Any:
    """Reads locks. Those with values that are nested more deeply than Python reads are marked as unreadable."""
    try:
        return read_json(text)
    except RecursionError:
        kept, depth, start, whole = [], 0, 0, text.decode()
        for token in _TOKEN.finditer(whole):
            if token[0] in "[{":
                depth += 1
                if depth == 500:
                    kept.append(f'{whole[start:token.start()]}"{_TOO_DEEP}"')
            elif token[0] in "]}":
                if depth == 500:
                    start = token.end()
                depth -= 1
        answer = read_json("".join([*kept, whole[start:]]))
        for lock in answer["locks"]:
            lock["unreadable"] = _TOO_DEEP in json.dumps(lock)
        return answer


def _summary(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else text[:199] + "…"


class Worker:
    """Runs flows, each in a thread. Locks are renewed by a thread of their own."""

    def __init__(
        self, url: str | None = None, token: str | None = None, *, owner: str | None = None, ttl_seconds: int = 30
    ) -> None:
        self._connection = Connection(url, token)
        self.client = Client(connection=self._connection)
        self._owner = owner or f"{socket.gethostname()} {os.getpid()} {uuid.uuid4()}"
        self._ttl = ttl_seconds
        self._flows: dict[str, Handler] = {}
        self._runs: dict[str, Run] = {}
        self._changed = Condition()
        self._running = Lock()

    def flow(self, name: str) -> Callable[[Handler], Handler]:
        """Registers the function of a flow, external or external:NAME. It is a decorator."""
        if name != "external" and not name.startswith("external:"):
            raise ValueError(f"flow {name}: a worker's flows are external or external:NAME")

        def register(handler: Handler) -> Handler:
            if not callable(handler) or inspect.iscoroutinefunction(handler):
                raise TypeError(f"flow {name}: a plain function is required, not async def")
            if name in self._flows:
                raise ValueError(f"flow {name}: the name is registered already")
            self._flows[name] = handler
            return handler

        return register

    def run(self, *, concurrency: int = 4, stop: Event | None = None, grace_seconds: float = 20) -> None:
        """Claims and runs up to concurrency executions, at most 1,000, until stop is set or the program is interrupted.

        Then running flows have grace_seconds to end. Then their locks expire, as after a crash.
        """
        if not self._flows:
            raise ValueError("register a flow before run")
        if not 1 <= concurrency <= 1000:
            raise ValueError(f"concurrency {concurrency}: use 1 to 1000, and more workers for more")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("this worker runs already")
        stop = stop or Event()
        over = Event()
        heart = Thread(target=self._beat, args=(over,), name="lanekeeper heartbeat", daemon=True)
        heart.start()
        try:
            while not stop.is_set():
                self._claim(concurrency, stop)
        except KeyboardInterrupt:
            stop.set()
        finally:
            self._drain(grace_seconds)
            over.set()
            heart.join()
            self._running.release()

    def _claim(self, concurrency: int, stop: Event) -> None:
        """Claims what there is room for, or waits for one; without room it waits for an end."""
        with self._changed:
            if len(self._runs) >= concurrency:
                self._changed.wait(0.5)
                return
            known = list(self._runs)
        body = {
            "flows": list(self._flows),
            "owner": self._owner,
            "ttl_seconds": self._ttl,
            "max": min(concurrency - len(known), 100),
            "wait_seconds": 5,
            "lock_ids": known,
        }
        try:
            locks = self._connection.call("POST", "/v1/locks", body, seconds=20, stop=stop, read=_read_locks)["locks"]
        except Stopped:
            return
        for lock in locks:
            run = Run(self._connection, lock)
            with self._changed:
                self._runs[run.lock_id] = run
            Thread(target=self._execute, args=(run, lock), daemon=True).start()

    def _drain(self, grace_seconds: float) -> None:
        deadline = time.monotonic() + grace_seconds
        with self._changed:
            while self._runs and time.monotonic() < deadline:
                self._changed.wait(0.2)
            left = list(self._runs.values())
        for run in left:
            run.stop(LostError("the worker stops; another continues the run"))

    def _beat(self, over: Event) -> None:
        every = self._ttl / 3
        pause = every
        while not over.wait(pause):
            with self._changed:
                locks = list(self._runs)
            states: list[dict[str, Any]] = []
            lost = False
            if locks:
                try:
                    body = {"lock_ids": locks}
                    states = self._connection.call("PUT", "/v1/locks", body, seconds=every, attempts=1)["locks"]
                except Exception as error:  # whatever came, this thread goes on
                    # Another beat sooner would get the same answer, or, after 429, burden a busy server.
                    lost = not isinstance(error, RequestError) and getattr(error, "code", 500) >= 500
                    if pause == every:
                        log.warning("locks not renewed; the next beat tries again: %s", error)
            pause = every / 10 if lost else every  # a lock ends three beats after its renewal
            for state in states:
                run = self._runs.get(state["lock_id"])
                if run is None:
                    continue
                if state["cancel_requested"]:
                    run.stop(LostError("the execution was cancelled"))
                elif not state["live"]:
                    run.stop(LostError("the lock expired; another worker may continue the run"))

    def _execute(self, run: Run, lock: dict[str, Any]) -> None:
        body = self._call_flow(run, lock)
        try:
            if run.stopped is None:
                try:
                    run.end(body)
                except Exception as error:  # the server cannot store this end; without one the flow would run again
                    body = {"status": "failed", "error_message": f"the end of the flow was refused: {error}"}
                    run.end(body)
        except LostError:
            pass
        except Exception as error:
            log.error("execution %s: its end was refused: %s", run.id, error)
            return
        finally:
            with self._changed:
                self._runs.pop(run.lock_id, None)
                self._changed.notify_all()
        if isinstance(run.stopped, Suspended):
            log.info("execution %s: waits", run.id)
        elif run.stopped is not None:
            log.warning("execution %s: stopped here: %s", run.id, run.stopped)
        elif body["status"] == "failed":
            log.warning("execution %s failed: %s", run.id, body["error_message"])
        else:
            log.info("execution %s: %s", run.id, body["status"])

    def _call_flow(self, run: Run, lock: dict[str, Any]) -> dict[str, Any]:
        """Returns the end of the flow. It does not count once the run has stopped."""
        try:
            if lock.get("unreadable"):
                raise RecursionError("the input or a record of the execution is nested too deeply for Python")
            execution = lock["execution"]
            result = self._flows[execution["flow"]](execution["input"], run)
            if not isinstance(result, Result):
                result = Result(result, _summary(result))
            body = {"status": "completed", "result": result.value, "result_summary": result.summary}
            json.dumps(body, allow_nan=False)
            return body
        except BaseException as error:  # also SystemExit: a run without an end would come again and again
            level = logging.ERROR if run.stopped is None else logging.DEBUG
            log.log(level, "execution %s: its flow raised an error", run.id, exc_info=True)
            return {"status": "failed", "error_message": _error_text(error, run.failed)}
