"""Durable workers for Lanekeeper.

A worker runs flows of a Lanekeeper server. The server records each step of a flow, so a flow goes on after a crash, in
any process, and waits for days without one::

    from lanekeeper import Worker

    worker = Worker()  # AGENT_URL, AGENT_TOKEN

    @worker.flow("external:sum")
    def add(input, run):
        paid = run.step("charge", lambda step: charge(input, step.key))
        return run.wait_for_event("shipped " + paid, timeout="7d")

    worker.run(concurrency=4)
"""

from ._client import Client, FlowError, RequestError, ResultError
from ._worker import LostError, Result, Run, Step, WaitTimeout, Worker

__all__ = [
    "Client",
    "FlowError",
    "LostError",
    "RequestError",
    "Result",
    "ResultError",
    "Run",
    "Step",
    "WaitTimeout",
    "Worker",
]
