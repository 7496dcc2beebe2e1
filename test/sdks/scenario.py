"""The scenario of the SDK tests, in Python's SDK. It appends each effect to the file EFFECTS."""

import logging
import os
import signal
import sys
from threading import Event

sys.path.insert(0, os.environ["SDK"])
from lanekeeper import Client, FlowError, LostError, RequestError, Result, ResultError, WaitTimeout, Worker

logging.basicConfig(level=logging.INFO, stream=sys.stderr)
worker = Worker(owner=os.environ.get("OWNER"), ttl_seconds=int(os.environ.get("TTL_SECONDS", "30")))


def effect(line):
    with open(os.environ["EFFECTS"], "a") as file:
        file.write(line + "\n")


@worker.flow("external:scenario")
def scenario(input, run):
    total = 0
    for n in range(1, input["steps"] + 1):

        def add(step, n=n, before=total):
            effect(f"add {n} {step.key}")
            if step.cancelled.wait(input["pause_ms"] / 1000):
                effect(f"aborted {n}")
            return before + n

        total = run.step("add", add)
    if input.get("event"):
        try:
            total += run.wait_for_event(input["event"], timeout=input.get("timeout"))["amount"]
        except WaitTimeout:
            total = -1
    if "sleep" in input:
        run.sleep(input["sleep"])
    if input.get("fail"):
        raise ValueError(input["fail"])
    return Result({"sum": total}, f"the sum is {total}")


# A flow that swallows every error does no harm.
@worker.flow("external:careless")
def careless(input, run):
    try:
        run.wait_for_event(input["event"])
    except BaseException:
        effect("swallowed")
    try:
        run.step("after", lambda step: effect("after"))
    except BaseException:
        effect("refused")
    return "done"


class NoText(Exception):
    def __str__(self):
        raise SystemExit("no text")


# Ends that are hard to record.
@worker.flow("external:odd")
def odd(input, run):
    match input["end"]:
        case "error without text":
            raise NoText
        case "error of nothing":
            raise BaseException
        case "error with NUL":
            raise ValueError("a\0b")
        case "huge error":
            raise ValueError("x" * (3 << 20))
        case "stopped":
            raise LostError("it was lost")
        case "value":
            return Result(b"1", "a number")
        case "summary":
            return Result(1, b"1")
        case "key":
            return worker.client.start("external:scenario", key="\u2713")
        case "infinity":
            return worker.client.start("external:scenario", float("inf"))


# A name that looks like the key of a repeated step.
@worker.flow("external:names")
def names(input, run):
    return ", ".join(run.step(name, lambda step: step.key[37:]) for name in ("item #2", "item", "item", "item"))


@worker.flow("external:again")
def again(input, run):
    worker.run()


@worker.flow("external:huge")
def huge(input, run):
    return "x" * (12 << 20)


@worker.flow("external:long")
def long(input, run):
    return "x" * (100 << 10)


@worker.flow("external:reader")
def reader(input, run):
    client = worker.client
    try:
        return client.result(client.start("external:long", key=run.id))
    except ResultError as error:
        return Result(error.id, str(error))


@worker.flow("external:no-json")
def no_json(input, run):
    return run.step("no json", lambda step: float("nan"))


@worker.flow("external:exit")
def leave(input, run):
    sys.exit("it gives up")


@worker.flow("external:broken")
def broken(input, run):
    def in_broken_function(step):
        return {}["missing"]

    if input.get("step"):
        run.step("read", in_broken_function)
    try:
        run.step("other", in_broken_function)
    except KeyError:
        pass
    in_broken_function(None)


@worker.flow("external:register")
def register(input, run):
    async def coroutine(input, run):
        pass

    errors = []
    for handler in (coroutine, lambda input, run: None, lambda input, run: None):
        try:
            worker.flow("external:twice")(handler)
        except (TypeError, ValueError) as error:
            errors.append(str(error))
    return "; ".join(errors)


# What a client does besides, from within a step.
@worker.flow("external:client")
def everything(input, run):
    def client(step):
        client, key = worker.client, step.key
        scenario = {"steps": 1, "pause_ms": 0, "event": key, "sleep": "1s"}
        first = client.start("external:scenario", scenario, key=key, on_lost="fail", progress_seconds=60)
        client.send_event(key, {"amount": 41}, id=key)
        total = client.result(first)["sum"]
        second = client.start("external:scenario", {"steps": 0, "event": f"never {key}"}, thread_id=f"of {key}")
        client.cancel(second, "not needed")
        try:
            client.result(second)
        except FlowError as error:
            ended = str(error).split(": ", 1)[1]
        try:
            Client("http://127.0.0.1:1", "x").result(first, timeout=0.1)
        except TimeoutError:
            pass
        try:
            client.result("00000000-0000-7000-8000-000000000000")
        except RequestError as error:
            return f"{total}, then {ended}, then {error.status}"

    return run.step("client", client)


stop = Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
worker.run(concurrency=int(os.environ.get("CONCURRENCY", "8")), stop=stop)
