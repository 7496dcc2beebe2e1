// Package operate is the surface on which an admin talks to the agent: `agent operate`, POST /v1/operate, and
// whatever else holds a Session.
//
// What an admin says is a turn: one execution of the flow "operate" under an op_ trace of its own, inserted
// together with the admin's message and claimed by the process that holds the connection, so that it
// streams. The turns of a session are one thread (channel operate, the session's id is the thread's), from
// which each takes its history. A turn has every skill, and a call that needs leave parks it until an
// admin has decided; nothing that is said here decides.
//
// One admin at a time: a session holds the lane "operate", on which heartbeats yield, while its admin works,
// between the turns too. The lane is free again when the session is closed, when nothing was said for Idle, or,
// when its process has died, as soon as the engine takes what that had claimed. It promises:
//
//   - Two turns are never taken at once, whoever takes them. A turn runs under the lease of its session, and a
//     lease that is lost stops it. A turn whose process died, or whose admin left while it waited for an
//     approval, goes on headless in any process that works; there its own execution holds the lane, and when
//     that is busy the turn waits durably until it is free. Its answer is in the thread.
//   - An admin who goes away while a turn runs cancels it: the execution ends, and what it was doing is stopped.
//     One who goes away while it waits for an approval leaves it waiting.
//   - A session has one agent, the default one or the one that the admin names first (package agents).
//   - Whoever finds the lane held is told by whom, and may wait in the lane's queue or watch (Watch).
//   - Events carry no secrets of tool calls. The arguments of a call that waits for leave are shown as they are,
//     because they are what is decided about.
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
	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
)

const (
	// Flow is the name under which a turn is registered with the engine.
	Flow = "operate"
	// Lane is held by the admin who works.
	Lane = "operate"
	// Channel is that of the threads of sessions.
	Channel = "operate"
)

// owner is whose threads sessions are: there is one admin token, so there is one.
const owner = "admin"

// retryPause lies between two tries to take up a turn that is ready.
const retryPause = 20 * time.Millisecond

// Options configure the surface. Pool, Engine, Keeper and Loop are required.
type Options struct {
	Pool   *pgxpool.Pool
	Engine *executions.Engine
	Keeper *lanes.Keeper
	Loop   *reason.Loop
	Logger *slog.Logger // nil for none
	Agent  string       // who acts where the Loop knows no agents; default "agent"
	// Tools are offered beside the skills, such as the one that delegates.
	Tools []reason.Tool
	// Idle is how long a session holds the lane after its last turn; default 5 minutes.
	Idle time.Duration
	// History is how many tokens of the session a turn is given; default 16,000.
	History int
	// MaxMessage is how long a message may be, in bytes; default 64 KiB.
	MaxMessage int
	// KeepAlive is the pause between two signs of life in a stream; default 15 s.
	KeepAlive time.Duration
	// Poll is how often a turn that another process runs, or that waits, is looked at; default 250 ms.
	Poll time.Duration
}

// Operate is the surface in one process. All methods may be called from any goroutine.
type Operate struct {
	Options
	log *slog.Logger

	mu       sync.Mutex
	sessions map[string]*Session // that hold the lane or take a turn, by id
	live     map[string]*live    // turns somebody here listens to, by execution
}

// New makes the surface and registers its flow with the engine. It starts nothing.
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
		sessions: map[string]*Session{}, live: map[string]*live{},
	}
	opts.Engine.Unforkable(Flow, "a turn answers one message in its session; say it again with agent operate")
	if err := opts.Engine.Register(Flow, o.turn); err != nil {
		return nil, err
	}
	return o, nil
}

// NewSessionID is an id that no session has had.
func NewSessionID() string { return "ses_" + ulid.Make().String() }

// Close ends all sessions of this process and frees their lane. Turns under way are not touched.
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

// listened is the live side of a turn, if this process has it.
func (o *Operate) listened(execution string) *live {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.live[execution]
}
