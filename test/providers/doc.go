// Package providers runs the surfaces against servers that reject the same requests as the model providers. The runs
// are a heartbeat with an objective, an operate session past its summary, and a chat with a correction. All must
// finish, and a server rejects a part of the protocol at most once. It has tests only.
package providers
