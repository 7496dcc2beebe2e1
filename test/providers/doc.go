// Package providers runs the surfaces against servers that refuse what the providers of models refuse: a heartbeat
// with an objective, an operate session over its summary, a chat with a correction. All have to finish, and a server
// refuses a part of the protocol once at most. It has tests only.
package providers
