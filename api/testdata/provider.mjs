// An OIDC issuer for the test: npm oidc-provider with three accounts. PORT 0 chooses a port, which is printed.
import { createServer } from "node:http";
import Provider from "oidc-provider";

const groups = { anna: ["agents"], bert: ["support", "others"], stranger: ["others"] };
const server = createServer();
server.listen(0, "127.0.0.1", () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [{
      client_id: "agent", client_secret: "a-secret-of-the-client", redirect_uris: [process.env.CALLBACK],
      grant_types: ["authorization_code"], response_types: ["code"],
    }],
    claims: { openid: ["sub"], profile: ["groups", "preferred_username"] },
    cookies: { keys: ["k"] },
    pkce: { required: () => true },
    findAccount: (_, sub) => ({
      accountId: sub,
      claims: async () => ({ sub, groups: groups[sub] ?? JSON.parse(process.env.GROUPS ?? "[]"), preferred_username: sub }),
    }),
  });
  server.on("request", provider.callback());
  console.log(issuer);
});
