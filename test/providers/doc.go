// Package providers runs the surfaces against servers that refuse the same requests as the providers of models. The
// runs are a heartbeat with an objective, an operate session over its summary, and a chat with a correction. All must
// finish, and a server refuses a part of the protocol at most once. It has tests only.
package providers
