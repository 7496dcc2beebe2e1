// Package operate is the surface on which an admin talks to the agent: `agent operate`, POST /v1/operate, and other
// users of Session.
//
// An admin's message is a turn: one execution of the flow "operate" under its own op_ trace. It is inserted together
// with the message and claimed by the process with the connection, so that it streams. The turns of a session form one
// thread (channel operate, with the session's id), which is their history. A turn may use the skills of all scopes that
// its agent allows. A call that needs approval parks the turn until an admin decides; a message decides no approval.
//
// One admin works at a time: a session holds the lane "operate" during its turns, and heartbeats yield to it. The
// sessions of the command line, and those with a session_id, hold the lane between their turns too, until they are
// closed or idle. After a crash, the engine releases the lane with the process's claims. Guarantees:
//
//   - A turn takes its steps under the lane. A turn runs under its session's lease, and a lost lease stops it. A turn
//     continues headless in any process if its process died, or its admin left during an approval. Then its execution
//     holds the lane, and waits durably while the lane is busy. It releases the lane while it waits for an approval or
//     a delegated task. The answer goes to the thread.
//   - An admin who disconnects during a turn cancels it and its running step. During an approval the turn keeps
//     waiting. After the answer, the turn completes.
//   - A session has one agent: the default agent, or the agent that the session named first (package agents).
//   - A second admin gets the holder's name, and can queue for the lane or watch (Watch).
//   - Events redact arguments and results of tool calls (package redact), and show at most 16 KiB of each. Events show
//     the arguments of a pending approval exactly, because the admin approves those arguments.
package operate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
)

const (
	// Flow is the registered name of turns.
	Flow = "operate"
	// Lane is held by the active admin.
	Lane = "operate"
	// Channel is the channel of session threads.
	Channel = "operate"
)

// owner owns the threads of all sessions: admins share them.
const owner = "admin"

// retryInterval is the pause between attempts to claim a ready turn.
const retryInterval = 20 * time.Millisecond

// Options configure the surface. Pool, Engine, Keeper and Loop are required.
type Options struct {
	Pool   *pgxpool.Pool
	Engine *executions.Engine
	Keeper *lanes.Keeper
	Loop   *reason.Loop
	Logger *slog.Logger // nil for none
	Agent  string       // the acting agent if the Loop knows no agents; default "agent"
	// Tools extend the skills, for example by delegation.
	Tools []reason.Tool
	// Idle is how long a session holds the lane after its last turn; default 5 minutes.
	Idle time.Duration
	// History bounds the session's history in a prompt, in tokens; default 16,000.
	History int
	// MaxMessage bounds a message in bytes; default 64 KiB.
	MaxMessage int
	// KeepAlive is the interval of keep-alive comments in a stream; default 15 s.
	KeepAlive time.Duration
	// Poll is the interval for turns that wait or run in another process; default 250 ms.
	Poll time.Duration
}

// Operate is the surface in one process. It is safe for concurrent use.
type Operate struct {
	Options
	log *slog.Logger

	mu        sync.Mutex
	sessions  map[string]*Session  // sessions with the lane or a running turn, by id
	listeners map[string]*listener // by execution
}

// New creates the surface and registers its flow. It starts no goroutine.
func New(opts Options) (*Operate, error) {
	if opts.Pool == nil || opts.Engine == nil || opts.Keeper == nil || opts.Loop == nil {
		return nil, errors.New("make operate: a pool, an engine, a keeper and a loop are required")
	}
	opts.Agent = cmp.Or(opts.Agent, agents.Alias)
	opts.Idle = cmp.Or(opts.Idle, 5*time.Minute)
	opts.History = cmp.Or(opts.History, 16_000)
	opts.MaxMessage = cmp.Or(opts.MaxMessage, 64<<10)
	opts.KeepAlive = cmp.Or(opts.KeepAlive, 15*time.Second)
	opts.Poll = cmp.Or(opts.Poll, 250*time.Millisecond)
	o := &Operate{
		Options: opts, log: cmp.Or(opts.Logger, slog.New(slog.DiscardHandler)),
		sessions: map[string]*Session{}, listeners: map[string]*listener{},
	}
	opts.Engine.Unforkable(Flow, "a turn answers one message in its session; say it again with agent operate")
	if err := opts.Engine.Register(Flow, o.runTurn); err != nil {
		return nil, err
	}
	return o, nil
}

// Close closes all sessions of this process. It does not touch running turns.
func (o *Operate) Close(ctx context.Context) error {
	o.mu.Lock()
	all := make([]*Session, 0, len(o.sessions))
	for _, s := range o.sessions {
		all = append(all, s)
	}
	o.mu.Unlock()
	var failures []error
	for _, s := range all {
		failures = append(failures, s.Close(ctx))
	}
	if err := errors.Join(failures...); err != nil {
		return fmt.Errorf("close operate: %w", err)
	}
	return nil
}

// findListener returns the listener of a turn in this process, or nil.
func (o *Operate) findListener(execution string) *listener {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.listeners[execution]
}
