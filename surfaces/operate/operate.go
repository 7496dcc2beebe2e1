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
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/oklog/ulid/v2"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
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

// As lets an agent act in the session from its next turn on; empty leaves that to the session. The error is a problem
// of status 404 for an agent that there is none of.
func (s *Session) As(ctx context.Context, agent string) error {
	if agent == "" {
		return nil
	}
	name := s.o.Agent
	if s.o.Loop.Agents != nil {
		a, err := s.o.Loop.Agents.Find(ctx, s.o.Pool, agent)
		if errors.Is(err, agents.ErrNotFound) {
			return problem.New(http.StatusNotFound, "there is no agent %.60q; see GET /v1/models, or agent agents ls", agent)
		}
		if err != nil {
			return err
		}
		name = a.Name
	} else if agent != name {
		return problem.New(http.StatusNotFound, "there is no agent %.60q", agent)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.agent = name
	return nil
}

// acting is who acts in a session that begins now.
func (s *Session) acting(ctx context.Context) (string, error) {
	s.mu.Lock()
	named := s.agent
	s.mu.Unlock()
	if named != "" || s.o.Loop.Agents == nil {
		return cmp.Or(named, s.o.Agent), nil
	}
	a, err := s.o.Loop.Agents.Default(ctx, s.o.Pool)
	return a.Name, err
}

// pinned is who acts in a session whose thread has an agent. Another one that the admin names is refused. A thread
// whose agent is not in service any more is the default agent's.
func (s *Session) pinned(ctx context.Context, tx pgx.Tx, thread, acting string) (string, error) {
	if thread == acting || s.o.Loop.Agents == nil {
		return acting, nil
	}
	owner, err := s.o.Loop.Agents.Acting(ctx, tx, thread)
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	named := s.agent
	s.mu.Unlock()
	if named != "" && named != owner.Name {
		return "", problem.New(http.StatusConflict, "session %s is one with %s; begin another session for %s", s.id, owner.Name, named)
	}
	return owner.Name, nil
}

// keyHeader makes a request count once. Who routes requests here refuses one whose first attempt is under way, until
// the process that has it is dead; the turn goes on all the same, so it is an effect of the key as well.
const keyHeader = "Idempotency-Key"

// turnKey is the dedupe key of a request's turn; empty without an Idempotency-Key.
func turnKey(r *http.Request, b Body) string {
	key := r.Header.Get(keyHeader)
	if key == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{key, b.SessionID, b.Message}, "\n")))
	return "operate " + hex.EncodeToString(sum[:])
}

// unused is the dedupe key under which a request's turn may begin, or the refusal of one that was begun before. After
// a turn that failed, which its client was told, or was of another day, the same request begins another.
func (o *Operate) unused(ctx context.Context, key string) (string, error) {
	for next := key; next != ""; {
		var id string
		var old bool // older than keys are kept: it may be used again
		err := o.Pool.QueryRow(ctx, `
			select id::text, created_at < clock_timestamp() - interval '24 hours' from agent_executions where dedupe_key = @key`,
			postgres.Strict{"key": next}).Scan(&id, &old)
		if errors.Is(err, pgx.ErrNoRows) {
			return next, nil
		}
		if err != nil {
			return "", fmt.Errorf("read turn of an idempotency key: %w", err)
		}
		x, err := executions.Get(ctx, o.Pool, id)
		if err != nil {
			return "", err
		}
		if !old && (!x.Status.Ended() || x.Status == executions.Completed) {
			return "", begunBefore(x)
		}
		next = key + " after " + id
	}
	return "", nil
}

func begunBefore(x executions.Execution) error {
	return problem.New(http.StatusConflict, "an earlier request with this %s began the turn, which is %s: its answer is in thread %s",
		keyHeader, x.Status, deref(x.ThreadID)).Kind("idempotency-key-used", "Already handled").WithTrace(x.TraceID)
}
