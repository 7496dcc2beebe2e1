package skills

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schema"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Builtin is a skill written in Go. It must return when ctx ends, and be safe for concurrent use. Its result must
// encode as JSON. A [*CallError] keeps its class.
type Builtin func(ctx context.Context, c Call) (any, error)

// Call is one call of a skill.
type Call struct {
	Skill          Skill
	Args           json.RawMessage // a JSON object; empty is {}
	IdempotencyKey string          // equal for every retry of a call; may be empty
	// Guarded replaces Args for a builtin, unless it is nil. It is Args with additions of the runtime. The registry
	// validates only Args.
	Guarded json.RawMessage
}

// Options configure a registry. The zero value runs only http: skills.
type Options struct {
	// Builtins are the builtins by the name after "builtin:".
	Builtins map[string]Builtin
	// Pool runs the sql: skills; nil for none.
	Pool *pgxpool.Pool
	// Databases opens the named databases of sql: skills; nil for none.
	Databases Databases
	// MCP calls the tools of other programs, for mcp: skills; nil for none.
	MCP RemoteCall
	// Flow starts executions, for flow: skills; nil for none. See [Flows].
	Flow RunFlow
	// AllowPrivate lists private targets of http: skills: addresses (127.0.0.1), ranges (10.0.0.0/8), host names
	// (db.internal) and host:port pairs.
	AllowPrivate []string
	// TLS configures http: skills, for a private certificate authority; nil for the system's.
	TLS *tls.Config
	// Getenv resolves ${env:NAME}; os.Getenv when nil.
	Getenv func(string) string
	// Logger logs rows that cannot run and stacks of panics; nil for none.
	Logger *slog.Logger
}

// Registry validates and makes calls. It is safe for concurrent use.
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

// prepared is a skill with compiled schema and handler.
type prepared struct {
	revision int
	schema   *jsonschema.Schema
	handler  handler
}

// New returns a registry. The error names an invalid entry of AllowPrivate.
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

// Available returns the enabled skills of the given scopes that this registry can run, by name. It always includes
// [ScopeBoth]; no scope means all scopes. It logs each row that cannot run.
func (r *Registry) Available(ctx context.Context, db postgres.DB, scopes ...string) ([]Skill, error) {
	all, err := inScope(ctx, db, scopes, true)
	if err != nil {
		return nil, err
	}
	return r.runnable(ctx, all), nil
}

// Split divides the skills of [QueueCallable] into enabled skills and skills on trial, and keeps their order. A skill
// on trial is disabled, but its next call decides whether it returns to service. Split omits skills that this registry
// cannot run, and logs them if they are enabled.
func (r *Registry) Split(ctx context.Context, callable []Skill) (enabled, onTrial []Skill) {
	for _, s := range callable {
		switch {
		case s.Enabled:
			enabled = append(enabled, s)
		case r.Runnable(s) == nil:
			onTrial = append(onTrial, s)
		}
	}
	return r.runnable(ctx, enabled), onTrial
}

func (r *Registry) runnable(ctx context.Context, all []Skill) []Skill {
	return slices.DeleteFunc(all, func(s Skill) bool {
		err := r.Runnable(s)
		if err != nil {
			r.logger.WarnContext(ctx, "skill cannot run", "skill", s.Name, "error", err)
		}
		return err != nil
	})
}

// Runnable returns why this registry cannot run s, or nil if it can. It ignores whether s is enabled.
func (r *Registry) Runnable(s Skill) error {
	p, err := r.prepare(s)
	if err != nil {
		return err
	}
	return p.handler.ready(r)
}

// Check returns an [*InvalidParams] with the violations of the skill's schema, at most the first 100 and the number of
// the others. For a skill that this registry cannot prepare, it returns a [*CallError].
func (r *Registry) Check(s Skill, args json.RawMessage) error {
	_, _, err := r.check(s, args)
	return err
}

func (r *Registry) check(s Skill, raw json.RawMessage) (*prepared, map[string]any, error) {
	p, err := r.prepare(s)
	if err != nil {
		return nil, nil, newCallError(ClassHandler, "%s cannot run: %s", s.Name, err)
	}
	value, found := decodeArgs(raw)
	if len(found) == 0 {
		if invalid, ok := errors.AsType[*jsonschema.ValidationError](p.schema.Validate(value)); ok {
			found = violations(invalid)
		}
	}
	if len(found) > 0 {
		return nil, nil, &InvalidParams{Skill: s.Name, Violations: firstViolations(found), Schema: s.Parameters()}
	}
	args, ok := value.(map[string]any)
	if !ok {
		return nil, nil, &InvalidParams{
			Skill: s.Name, Violations: []Violation{{Message: "must be a JSON object"}},
			Schema: s.Parameters(),
		}
	}
	return p, schema.WithDefaults(p.schema, args), nil
}

// prepare compiles a skill once per revision.
func (r *Registry) prepare(s Skill) (*prepared, error) {
	r.mu.Lock()
	p := r.prepared[s.ID]
	r.mu.Unlock()
	if p != nil && p.revision == s.Revision {
		return p, nil
	}
	compiled, err := compile(s.Parameters())
	if err != nil {
		return nil, fmt.Errorf("compile the parameters of %s: %w", s.Name, err)
	}
	h, problems := parseHandler(s.Handler, s.Config, propertyNames(compiled))
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	p = &prepared{revision: s.Revision, schema: compiled, handler: h}
	if s.ID != "" {
		r.mu.Lock()
		r.prepared[s.ID] = p
		r.mu.Unlock()
	}
	return p, nil
}

// Invoke calls a skill and returns its result as JSON. It ignores whether the skill is enabled. The error is an
// [*InvalidParams] or a [*CallError], or wraps the cause of ctx if ctx has ended.
func (r *Registry) Invoke(ctx context.Context, c Call) (json.RawMessage, error) {
	if trace.IDFrom(ctx).Surface() == trace.Eval { // the eval's sandbox answers instead of a handler
		return nil, newCallError(ClassRefused, "a trial of an eval cannot call %s", c.Skill.Name)
	}
	p, args, err := r.check(c.Skill, c.Args)
	if err != nil {
		return nil, err
	}
	if err := p.handler.ready(r); err != nil {
		return nil, newCallError(ClassHandler, "%s cannot run: %s", c.Skill.Name, err)
	}
	if c.Guarded != nil {
		c.Args = c.Guarded
	}
	limited, cancel := context.WithTimeout(ctx, c.Skill.Timeout())
	defer cancel()
	result, err := r.call(limited, p.handler, c, args)
	if err != nil {
		return nil, classify(ctx, limited, c, err)
	}
	return result, nil
}

// call makes the call and encodes its result. A panic becomes an error.
func (r *Registry) call(
	ctx context.Context, h handler, c Call, args map[string]any,
) (result json.RawMessage, err error) {
	defer func() {
		if p := recover(); p != nil {
			r.logger.ErrorContext(ctx, "skill panicked", "skill", c.Skill.Name, "panic", fmt.Sprint(p), "stack",
				string(debug.Stack()))
			err = newCallError(ClassPanic, "%s panicked: %v", c.Skill.Name, p)
		}
	}()
	value, err := h.call(ctx, r, c, args)
	if err != nil {
		return nil, err
	}
	return encodeResult(value)
}

// handler runs one skill with validated arguments.
type handler interface {
	call(ctx context.Context, r *Registry, c Call, args map[string]any) (any, error)
	// ready returns why the registry cannot run the handler.
	ready(r *Registry) error
}

// parseHandler reads the handler of a row. parameters are the names that the skill declares.
func parseHandler(text string, config json.RawMessage, parameters []string) (handler, []error) {
	kind, rest, ok := strings.Cut(text, ":")
	if !ok {
		return nil, []error{fmt.Errorf("handler: %q must begin with builtin:, sql:, http:, mcp: or flow:", text)}
	}
	rest = strings.TrimSpace(rest)
	switch kind {
	case "builtin":
		return parseBuiltin(rest, config)
	case "sql":
		return parseSQL(rest, config, parameters)
	case "http":
		return parseHTTP(rest, config, parameters)
	case "mcp":
		return parseMCP(rest, config)
	case "flow":
		return parseFlow(rest, config)
	}
	return nil, []error{fmt.Errorf("handler: %q is not a kind of handler; use builtin:, sql:, http:, mcp: or flow:", kind)}
}

// decodeConfig decodes config into target and rejects unknown fields.
func decodeConfig(config json.RawMessage, target any) error {
	if len(config) == 0 {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(config))
	d.DisallowUnknownFields()
	if err := d.Decode(target); err != nil && !errors.Is(err, io.EOF) {
		if te, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
			return fmt.Errorf("config.%s: must be a %s, not a %s", te.Field, te.Type, te.Value)
		}
		return fmt.Errorf("config: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	return nil
}

type builtinHandler struct{ name string }

func parseBuiltin(name string, config json.RawMessage) (handler, []error) {
	if !namePattern.MatchString(name) {
		return nil, []error{fmt.Errorf("handler: builtin:%s must name a builtin with 1 to 64 of the characters a-z A-Z 0-9 "+
			"_ -", name)}
	}
	var builtinConfig map[string]any // only the builtin knows its config
	if err := decodeConfig(config, &builtinConfig); err != nil {
		return nil, []error{err}
	}
	return builtinHandler{name: name}, nil
}

func (h builtinHandler) ready(r *Registry) error {
	if r.builtins[h.name] == nil {
		return fmt.Errorf("this program has no builtin %q", h.name)
	}
	return nil
}

func (h builtinHandler) call(ctx context.Context, r *Registry, c Call, _ map[string]any) (any, error) {
	return r.builtins[h.name](ctx, c)
}
