package skills

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Builtin is a skill written in Go. It returns when ctx ends, and a value that encodes as JSON. It
// may be called from many goroutines. An error of type [*CallError] keeps its class.
type Builtin func(ctx context.Context, c Call) (any, error)

// Call is one call of a skill.
type Call struct {
	Skill          Skill
	Args           json.RawMessage // a JSON object; empty is {}
	IdempotencyKey string          // the same for every try of the same call; may be empty
}

// Options are what a registry is made of. The zero value runs http: skills and nothing else.
type Options struct {
	// Builtins by the name behind "builtin:".
	Builtins map[string]Builtin
	// Pool runs the sql: skills; nil for none.
	Pool *pgxpool.Pool
	// Databases opens the named databases of sql: skills; nil for none.
	Databases Databases
	// MCP calls the tools of other programs, for mcp: skills; nil for none.
	MCP RemoteCall
	// Flow starts executions, for flow: skills; nil for none. See [Flows].
	Flow RunFlow
	// AllowPrivate lists what http: skills may reach besides public addresses: addresses
	// (127.0.0.1), ranges (10.0.0.0/8), host names (db.internal) and host:port pairs.
	AllowPrivate []string
	// TLS of http: skills, for a certificate authority of one's own; nil for the system's.
	TLS *tls.Config
	// Getenv resolves ${env:NAME}; os.Getenv when nil.
	Getenv func(string) string
	// Logger gets what is wrong with rows and stacks of panics; nil for none.
	Logger *slog.Logger
}

// Registry checks and makes calls. Its methods may be called from any goroutine.
type Registry struct {
	builtins map[string]Builtin
	pool     *pgxpool.Pool
	named    Databases
	mcp      RemoteCall
	flow     RunFlow
	client   *http.Client
	getenv   func(string) string
	logger   *slog.Logger

	mu       sync.Mutex
	prepared map[string]*prepared // by skill id
}

// prepared is a row made ready to be called.
type prepared struct {
	revision int
	schema   *jsonschema.Schema
	handler  handler
}

// New returns a registry. The error names the entry of AllowPrivate that cannot be read.
func New(o Options) (*Registry, error) {
	client, err := NewGuardedClient(o.AllowPrivate, o.TLS)
	if err != nil {
		return nil, err
	}
	r := &Registry{
		builtins: o.Builtins,
		pool:     o.Pool,
		named:    o.Databases,
		mcp:      o.MCP,
		flow:     o.Flow,
		client:   client,
		getenv:   o.Getenv,
		logger:   o.Logger,
		prepared: make(map[string]*prepared),
	}
	if r.getenv == nil {
		r.getenv = os.Getenv
	}
	if r.logger == nil {
		r.logger = slog.New(slog.DiscardHandler)
	}
	return r, nil
}

// Available returns the enabled skills of the given scopes that this registry can run, by name.
// [ScopeBoth] is always included; no scope means all. A row that cannot be run is logged.
func (r *Registry) Available(ctx context.Context, db postgres.DB, scopes ...string) ([]Skill, error) {
	all, err := enabled(ctx, db, scopes)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(s Skill) bool {
		err := r.Runnable(s)
		if err != nil {
			r.logger.WarnContext(ctx, "skill cannot run", "skill", s.Name, "error", err)
		}
		return err != nil
	}), nil
}

// Runnable says why this registry cannot run s, whether or not it is enabled; nil when it can.
func (r *Registry) Runnable(s Skill) error {
	p, err := r.prepare(s)
	if err != nil {
		return err
	}
	return p.handler.ready(r)
}

// Check reports arguments that s does not take as an [*InvalidParams] with every violation.
func (r *Registry) Check(s Skill, args json.RawMessage) error {
	_, _, err := r.check(s, args)
	return err
}

func (r *Registry) check(s Skill, raw json.RawMessage) (*prepared, map[string]any, error) {
	p, err := r.prepare(s)
	if err != nil {
		return nil, nil, failure(ClassHandler, "%s cannot run: %s", s.Name, err)
	}
	value, found := decodeArgs(raw)
	if len(found) == 0 {
		if invalid, ok := errors.AsType[*jsonschema.ValidationError](p.schema.Validate(value)); ok {
			found = violations(invalid)
		}
	}
	if len(found) > 0 {
		return nil, nil, &InvalidParams{Skill: s.Name, Violations: found, Schema: s.Parameters()}
	}
	args, ok := value.(map[string]any)
	if !ok {
		return nil, nil, &InvalidParams{Skill: s.Name, Violations: []Violation{{Message: "must be a JSON object"}}, Schema: s.Parameters()}
	}
	return p, withDefaults(p.schema, args), nil
}

// prepare compiles a row, once per revision.
func (r *Registry) prepare(s Skill) (*prepared, error) {
	r.mu.Lock()
	p := r.prepared[s.ID]
	r.mu.Unlock()
	if p != nil && s.ID != "" && p.revision == s.Revision {
		return p, nil
	}
	schema, err := compile(s.Parameters())
	if err != nil {
		return nil, fmt.Errorf("compile the parameters of %s: %w", s.Name, err)
	}
	h, problems := parseHandler(s.Handler, s.Config, propertyNames(schema))
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	p = &prepared{revision: s.Revision, schema: schema, handler: h}
	if s.ID != "" {
		r.mu.Lock()
		r.prepared[s.ID] = p
		r.mu.Unlock()
	}
	return p, nil
}

// Invoke calls a skill and returns its result as JSON. It does not look at whether the skill is
// enabled. The error is an [*InvalidParams], a [*CallError], or, when ctx has ended, its cause.
func (r *Registry) Invoke(ctx context.Context, c Call) (json.RawMessage, error) {
	p, args, err := r.check(c.Skill, c.Args)
	if err != nil {
		return nil, err
	}
	if err := p.handler.ready(r); err != nil {
		return nil, failure(ClassHandler, "%s cannot run: %s", c.Skill.Name, err)
	}
	limited, cancel := context.WithTimeout(ctx, c.Skill.Timeout())
	defer cancel()
	result, err := r.guarded(limited, p.handler, c, args)
	if err != nil {
		return nil, classify(ctx, limited, c, err)
	}
	return result, nil
}

// guarded turns a panic into an error.
func (r *Registry) guarded(ctx context.Context, h handler, c Call, args map[string]any) (result json.RawMessage, err error) {
	defer func() {
		if p := recover(); p != nil {
			r.logger.ErrorContext(ctx, "skill panicked", "skill", c.Skill.Name, "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
			err = failure(ClassPanic, "%s panicked: %v", c.Skill.Name, p)
		}
	}()
	value, err := h.call(ctx, r, c, args)
	if err != nil {
		return nil, err
	}
	return encodeResult(value)
}
