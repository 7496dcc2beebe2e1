"""The connection to a server, and the client that starts executions."""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from threading import Event
from typing import Any, Literal
from urllib.parse import quote


log = logging.getLogger("lanekeeper")

MAX_BODY = 1 << 20
"""The server's limit. It may close the connection of a much larger body, as a server that is away does."""


class RequestError(Exception):
    """The server refused a request."""

    def __init__(self, status: int, detail: str, holder: str | None = None) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.holder = holder


class FlowError(Exception):
    """An execution ended without a result: its status is failed, timeout or cancelled."""

    def __init__(self, id: str, status: str, message: str) -> None:
        super().__init__(f"execution {id}: {status}: {message}")
        self.id = id
        self.status = status


class ResultError(Exception):
    """An execution completed, but the server does not show its result as the flow returned it."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"execution {id} completed, but its result has more than 64 KiB, contains a secret, or needs the scope "
            "threads:read"
        )
        self.id = id


class Stopped(Exception):
    """The caller's stop event was set while the server was away."""


class NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send the token to another host, and a POST as a GET."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _int(text: str) -> float:
    try:
        return int(text)
    except ValueError:  # more digits than Python converts
        return float(text)


def read_json(text: str | bytes) -> Any:
    return json.loads(text, parse_int=_int)


class Connection:
    """Sends requests. Each of them may be sent twice, so it is repeated while the server is away."""

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self.url = (url or os.environ.get("AGENT_URL") or "http://127.0.0.1:8080").strip().rstrip("/")
        if not self.url.lower().startswith(("http://", "https://")):
            raise ValueError(f"the URL {self.url} does not begin with http:// or https://: pass url, or set AGENT_URL")
        self.token = (token or os.environ.get("AGENT_TOKEN") or os.environ.get("AGENT_ADMIN_TOKEN") or "").strip()
        if not self.token:
            raise ValueError("a token is missing: pass token, or set AGENT_TOKEN")
        if not (self.token.isascii() and self.token.isprintable()):  # the errors of http.client would show the token
            raise ValueError("the token has a line break or another character that is not printable ASCII")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirects())

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: dict[str, str] | None = None,
        seconds: float = 15,
        stop: Event | None = None,
        attempts: int | None = None,
        deadline: float | None = None,
        read: Callable[[bytes], Any] = read_json,
    ) -> Any:
        """Returns the JSON of a response. stop ends the repetition with Stopped, attempts with the last error, and
        deadline, of time.monotonic, with TimeoutError."""
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        if data is not None and len(data) > MAX_BODY:
            raise RequestError(413, f"the body is larger than {MAX_BODY} bytes")
        wait = 0.1
        while True:
            if stop is not None and stop.is_set():
                raise Stopped
            request = urllib.request.Request(self.url + path, data=data, method=method)
            request.add_header("Authorization", f"Bearer {self.token}")
            request.add_header("Content-Type", "application/json")
            for name, value in (headers or {}).items():
                request.add_header(name, value)
            left = seconds if deadline is None else min(seconds, max(deadline - time.monotonic(), 1.0))
            try:
                with self._opener.open(request, timeout=left) as response:
                    text = response.read()
                    return read(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code not in (408, 429):
                    raise _problem(error) from None
                failure: Exception = error
            except (OSError, http.client.HTTPException, json.JSONDecodeError, UnicodeDecodeError) as error:
                failure = error  # a proxy may answer for the server, in another form
            if attempts is not None:
                attempts -= 1
                if attempts <= 0:
                    raise failure
            if wait == 0.1:
                log.warning("the request to %s failed and is tried again: %s", self.url, failure)
            pause = wait / 2 + wait / 2 * random.random()
            if deadline is not None and time.monotonic() + pause > deadline:
                raise TimeoutError(f"the request to {self.url} failed until its time was over: {failure}") from failure
            if stop is None:
                time.sleep(pause)
            else:
                stop.wait(pause)
            wait = min(wait * 2, 5.0)


def _problem(error: urllib.error.HTTPError) -> RequestError:
    if error.code < 400:
        place = error.headers["Location"]
        return RequestError(error.code, f"the server redirects to {place}: pass its address as url, or set AGENT_URL")
    try:
        text = error.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):  # it was cut off
        text = str(error.reason)
    try:
        problem = json.loads(text)
        return RequestError(error.code, problem.get("detail") or problem.get("title") or text, problem.get("holder"))
    except (ValueError, AttributeError):
        return RequestError(error.code, text[:500])


class Client:
    """Starts executions, sends events, and reads results. It is safe for threads."""

    def __init__(self, url: str | None = None, token: str | None = None, *, connection: Connection | None = None) -> None:
        self._connection = connection or Connection(url, token)

    def start(
        self,
        flow: str,
        input: Any = None,
        *,
        key: str | None = None,
        on_lost: Literal["hand_on", "fail"] | None = None,
        progress_seconds: int | None = None,
        thread_id: str | None = None,
    ) -> str:
        """Starts an execution, and returns its id. It is durable then. Starts with one key return one execution."""
        body: dict[str, Any] = {"flow": flow, "input": {} if input is None else input}
        if on_lost is None and (flow == "external" or flow.startswith("external:")):
            on_lost = "hand_on"
        for name, value in (("on_lost", on_lost), ("progress_seconds", progress_seconds), ("thread_id", thread_id)):
            if value is not None:
                body[name] = value
        headers = {"Idempotency-Key": key or str(uuid.uuid4())}
        return self._connection.call("POST", "/v1/executions", body, headers=headers)["id"]

    def send_event(self, key: str, data: Any = None, *, id: str | None = None) -> None:
        """Sends an event to the flow that waits for key; without one, it is kept for the first."""
        body = {
            "event": "EVENT_COMPLETED",
            "key": key,
            "data": {} if data is None else data,
            "id": id or str(uuid.uuid4()),
        }
        self._connection.call("POST", "/v1/events", body)

    def result(self, id: str, *, timeout: float | None = None) -> Any:
        """Waits for the end of an execution, and returns its result of at most 64 KiB.

        Raises FlowError unless it completed, ResultError if the server does not show the result as the flow returned
        it, TimeoutError after timeout seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        wait = 0.05
        while True:
            x = self._connection.call("GET", f"/v1/executions/{quote(id, safe='')}", deadline=deadline)
            if x["status"] == "completed":
                if x.get("result_altered"):
                    raise ResultError(id)
                return x["result"]
            if x["status"] in ("failed", "timeout", "cancelled"):
                raise FlowError(id, x["status"], x.get("error_message") or x.get("cancel_reason") or "")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"execution {id} has not ended after {timeout} seconds")
            time.sleep(wait)
            wait = min(wait * 1.5, 1.0)

    def cancel(self, id: str, reason: str) -> None:
        """Cancels an execution."""
        self._connection.call("POST", f"/v1/executions/{quote(id, safe='')}/cancel", {"reason": reason})
