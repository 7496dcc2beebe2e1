// Compiled by the tests, never run: the types as a program uses them.
import { Client, Result, Worker } from "./index.js";

interface Order { id: number }
interface Receipt { paid: string; weight: number }

const worker = new Worker({ ttlSeconds: 30 });
worker.flow<Order, Receipt>("external:order", async (order, run) => {
  const paid = await run.step("charge", async ({ key, signal }) => `${key} ${order.id} ${signal.aborted}`);
  const parcel = await run.waitForEvent<{ weight: number }>(`shipped ${order.id}`, { timeout: "7d" });
  await run.sleep(1000);
  return new Result({ paid, weight: parcel.weight }, `order ${order.id}`);
});
// @ts-expect-error the result of the flow is a Receipt
worker.flow<Order, Receipt>("external:wrong", async () => "no receipt");

export async function run(client: Client): Promise<number> {
  const { id } = await client.start("external:order", { id: 7 }, { key: "order 7" });
  await client.sendEvent("shipped 7", { weight: 3 }, { id: "parcel 7" });
  return (await client.result<Receipt>(id)).weight;
}
