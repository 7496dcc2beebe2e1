import os, sys
sys.path.insert(0, os.environ["SDK"])

class bank:
    def charge(order, key):
        return f"charged for {order['id']}"

from lanekeeper import Worker

worker = Worker()  # AGENT_URL and AGENT_TOKEN

@worker.flow("external:order")
def order(input, run):
    paid = run.step("charge", lambda step: bank.charge(input, step.key))
    parcel = run.wait_for_event(f"shipped {input['id']}", timeout="7d")
    return {"paid": paid, "parcel": parcel}

worker.run(concurrency=4)
