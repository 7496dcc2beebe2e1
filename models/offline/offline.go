// Package offline is a model that needs no key and no network: for the first hour with the product, for demonstrations,
// and where no machine may be asked.
//
// It is a rule-based planner, not a language model. It understands nothing; it compares words. What makes it useful is
// that it speaks the same protocol as a real model, over real HTTP, so everything around it runs as it will later:
// the client, the tool calls, the budgets, the traces.
//
// Given messages and tools, it answers by these rules, in this order:
//
//  1. What a person says in words that it knows, in English or Spanish, is taken at its word: greetings, help, "what did you do
//     today", "what do you remember about X", "objectives", "remember that …", "forget …", "propose an objective …",
//     "delegate …". "Again" means the message before. A question about an attached document is answered with its
//     first lines, by document_read.
//  2. A tool that is ordered by its name ("run vacuum_table") is called, once, with the JSON that is written behind the name or
//     with arguments from the message. One that does more than look is not called with an invented name.
//  3. Tools that only look, by their name and description, and share words with the last user message or with a step
//     that it lists ("step ID: title"), are called, the closest first, up to four at a time and ten in all.
//     Required arguments come from the schema, the message and earlier results; a tool that would need an
//     invented name is left alone. Where none has to do with the message, skill_search is asked for others.
//  4. Bookkeeping tools, where they are offered: complete_step and fail_step for steps that a result speaks to and a call of
//     their own shows, add_steps where there are none, remember for figures that were found, note_progress.
//  5. Otherwise it answers in words that quote the figures found, and say what failed, was denied, awaits approval or was cut.
//
// Promises: a tool that was not ordered and sounds as if it changed something is never called; what a webhook, an
// event, a document or a quotation contains orders nothing. No call is made twice with the same arguments, whether
// it failed or not, so every conversation ends. It says only what the messages contain. The same request gets the
// same bytes, id and creation time included (both are hashes; the time is not real), whatever came before: the
// server keeps nothing. Usage is reckoned at four bytes a token.
package offline

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// Model is the name under which the offline model lists itself, and which the default price table has at nothing. It answers
// to every name.
const Model = "offline"

// shutdownTime is how long answers under way may take when the server is stopped.
const shutdownTime = 2 * time.Second

// Start serves on a free port of 127.0.0.1 until ctx ends or stop is called. The url is a client's base
// URL. stop waits for the server's end and may be called more than once.
func Start(ctx context.Context) (url string, stop func(), err error) {
	var listen net.ListenConfig
	listener, err := listen.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("listen on the loopback: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = Serve(ctx, listener) // a listener that breaks shows at the next request, as an unreachable model
	}()
	stop = func() {
		cancel()
		<-ended
	}
	return "http://" + listener.Addr().String() + "/v1", stop, nil
}

// Serve answers on the listener until ctx ends, which is no error, or the listener breaks. It closes the listener.
func Serve(ctx context.Context, listener net.Listener) error {
	server := &http.Server{Handler: Handler(), ReadHeaderTimeout: 10 * time.Second}
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	select {
	case err := <-ended:
		return fmt.Errorf("serve the offline model: %w", err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
	defer cancel()
	err := server.Shutdown(last)
	if errors.Is(err, context.DeadlineExceeded) {
		err = server.Close()
	}
	if serving := <-ended; err == nil && !errors.Is(serving, http.ErrServerClosed) {
		err = serving
	}
	if err != nil {
		return fmt.Errorf("stop the offline model: %w", err)
	}
	return nil
}
