package agents

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Settings are the defaults of the installation. Without declared agents, they are its only agent.
type Settings struct {
	Name          string // AGENT_NAME
	Model         string // AGENT_MODEL
	Effort        string // AGENT_REASONING_EFFORT
	Timezone      string // AGENT_TIMEZONE
	HeartbeatCron string // AGENT_HEARTBEAT_CRON
	Limits        Limits
}

// Directory finds agents. Its methods read the database at each call, so a change applies from the next turn on. It is
// safe for concurrent use. The zero value is an installation without settings.
type Directory struct {
	Settings Settings
}

// List returns the current agents: the default first, then by name. Without declared agents, it returns the agent of
// the installation.
func (d *Directory) List(ctx context.Context, db postgres.DB) ([]Agent, error) {
	rows, err := current(ctx, db)
	if err != nil {
		return nil, err
	}
	return d.list(rows), nil
}

func (d *Directory) list(rows []row) []Agent {
	if len(rows) == 0 {
		return []Agent{d.undeclared()}
	}
	all := make([]Agent, len(rows))
	for i, r := range rows {
		all[i] = d.fill(r)
	}
	return all
}

// QueueList queues the statement of List.
func (d *Directory) QueueList(b *pgx.Batch, into *[]Agent) {
	queueCurrent(b, func(rows []row) { *into = d.list(rows) })
}

// Default returns the default agent.
func (d *Directory) Default(ctx context.Context, db postgres.DB) (Agent, error) {
	all, err := d.List(ctx, db)
	if err != nil {
		return Agent{}, err
	}
	return all[0], nil
}

// Find returns an agent by name, the default one for "" and [Alias], or [ErrNotFound].
func (d *Directory) Find(ctx context.Context, db postgres.DB, name string) (Agent, error) {
	all, err := d.List(ctx, db)
	if err != nil {
		return Agent{}, err
	}
	return Find(all, name)
}

// Find is [Directory.Find] among the agents that [Directory.List] returned.
func Find(all []Agent, name string) (Agent, error) {
	if name == "" || name == Alias {
		return all[0], nil
	}
	for _, a := range all {
		if a.Name == name {
			return a, nil
		}
	}
	return Agent{}, fmt.Errorf("find agent %q: %w", name, ErrNotFound)
}

// Acting returns the agent of an execution by the name on its row: the default agent for an unknown name.
func (d *Directory) Acting(ctx context.Context, db postgres.DB, name string) (Agent, error) {
	all, err := d.List(ctx, db)
	if err != nil {
		return Agent{}, err
	}
	return Acting(all, name), nil
}

// Acting is [Directory.Acting] among the agents that [Directory.List] returned.
func Acting(all []Agent, name string) Agent {
	i := slices.IndexFunc(all, func(a Agent) bool { return a.Name == name })
	return all[max(i, 0)]
}

// Version returns one version of an agent, even of a removed one. Version 0 is the agent of the installation.
func (d *Directory) Version(ctx context.Context, db postgres.DB, name string, number int) (Agent, error) {
	if number == 0 {
		return d.undeclared(), nil
	}
	r, err := version(ctx, db, name, number)
	if err != nil {
		return Agent{}, err
	}
	return d.fill(r), nil
}

// Of adds the defaults to a document that is stored elsewhere. Version 0 is the agent of the installation.
func (d *Directory) Of(declared Definition, version int) Agent {
	return d.fill(row{Name: declared.Name, Version: version, Definition: declared})
}

// Reachable lists the agents that a chat key may reach: those that name it, or else the default one.
func (d *Directory) Reachable(ctx context.Context, db postgres.DB, key string) ([]Agent, error) {
	all, err := d.List(ctx, db)
	return ReachedBy(all, key), err
}

// ReachedBy filters all by a chat key, like [Directory.Reachable].
func ReachedBy(all []Agent, key string) []Agent {
	bound := slices.ContainsFunc(all, func(a Agent) bool { return slices.Contains(a.Keys, key) })
	return slices.DeleteFunc(slices.Clone(all), func(a Agent) bool { return !a.reachedBy(key, bound) })
}

// undeclared returns the agent of the installation.
func (d *Directory) undeclared() Agent {
	a := d.fill(row{Definition: Definition{Name: cmp.Or(d.Settings.Name, Alias), Default: true}})
	a.declared = Definition{}
	return a
}

// fill adds the defaults to a document.
func (d *Directory) fill(r row) Agent {
	r.Definition.Name = cmp.Or(r.Name, r.Definition.Name) // the column wins
	a := Agent{
		Definition: r.Definition, Version: r.Version, Source: r.Source, CreatedAt: r.CreatedAt, declared: r.Definition,
	}
	a.Model = cmp.Or(a.Model, d.Settings.Model)
	if a.Temperature == nil {
		a.Effort = cmp.Or(a.Effort, d.Settings.Effort)
	}
	a.Timezone = cmp.Or(a.Timezone, d.Settings.Timezone, "UTC")
	a.Memory = cmp.Or(a.Memory, MemoryShared)
	if a.Heartbeat == nil && a.Default {
		a.Heartbeat = &Heartbeat{}
	}
	if a.Heartbeat != nil {
		a.Heartbeat = &Heartbeat{Cron: cmp.Or(a.Heartbeat.Cron, d.Settings.HeartbeatCron), Prompt: a.Heartbeat.Prompt}
	}
	a.Limits = a.Limits.within(d.Settings.Limits)
	return a
}

// within is the tighter of two limits, field by field.
func (l Limits) within(outer Limits) Limits {
	return Limits{
		Iterations: tighter(l.Iterations, outer.Iterations), Tokens: tighter(l.Tokens, outer.Tokens),
		CostUSD: tighter(l.CostUSD, outer.CostUSD), DayUSD: tighter(l.DayUSD, outer.DayUSD),
	}
}

// tighter returns the smaller of two bounds; 0 is no bound.
func tighter[N int | float64](a, b N) N {
	if a == 0 || b == 0 {
		return a + b
	}
	return min(a, b)
}

// row is a row of agent_agents.
type row struct {
	Name       string
	Version    int
	Definition Definition
	Source     string
	CreatedAt  time.Time
}

// Put makes d the current version of d.Name and reports whether anything changed. Running turns keep their version.
// The caller serializes calls for one name, as a workspace's apply does.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	verb := fmt.Sprintf("put agent %q", d.Name)
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	return postgres.PutVersion(ctx, db, verb, "agent_agents", d.Name, d, postgres.Strict{"is_default": d.Default})
}

// Remove retires the workspace's agents except keep, and returns their names. Their versions stay, for running turns.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.RetireOthers(ctx, db, "agents", "agent_agents", keep)
}

// current reads the current agents: the default first, then by name.
func current(ctx context.Context, db postgres.DB) (all []row, err error) {
	b := &pgx.Batch{}
	queueCurrent(b, func(rows []row) { all = rows })
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return nil, fmt.Errorf("list agents: %w", err)
	}
	return all, nil
}

func queueCurrent(b *pgx.Batch, use func([]row)) {
	b.Queue(`
		select name, version, definition, source, created_at from agent_agents
		 where current order by not is_default, name`).Query(func(rows pgx.Rows) error {
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[row])
		if err == nil {
			use(all)
		}
		return err
	})
}

// version reads one version of an agent, even of a removed one.
func version(ctx context.Context, db postgres.DB, name string, number int) (row, error) {
	return postgres.RowOr[row](ctx, db, ErrNotFound, fmt.Sprintf("read version %d of agent %s", number, name), `
		select name, version, definition, source, created_at from agent_agents
		 where name = @name and version = @version`,
		postgres.Strict{"name": name, "version": number})
}

// Versions lists the versions of an agent, the newest first, or returns [ErrNotFound].
func Versions(ctx context.Context, db postgres.DB, name string) ([]int, error) {
	all, err := postgres.Values[int](ctx, db, "list versions of agent "+name,
		`select version from agent_agents where name = @name order by version desc`,
		postgres.Strict{"name": name})
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("list versions of agent %s: %w", name, ErrNotFound)
	}
	return all, err
}

// ErrNoMemory reports an agent with memory: none.
var ErrNoMemory = errors.New("the agent has no memory (memory: none)")

type actingKey struct{}

// With sets the acting agent in the context.
func With(ctx context.Context, a Agent) context.Context {
	return context.WithValue(ctx, actingKey{}, a)
}

// ActingMemory returns the owner of the acting agent's memory. The agent is that of the context ([With]), or else the
// one with the name on the execution's row. It returns [ErrNoMemory] for an agent without memory.
func (d *Directory) ActingMemory(ctx context.Context, db postgres.DB, name string) (string, error) {
	a, known := ctx.Value(actingKey{}).(Agent)
	if !known {
		var err error
		if a, err = d.Acting(ctx, db, name); err != nil {
			return "", err
		}
	}
	return a.MemoryOwner()
}

// MemoryOf returns the owner of a named agent's memory, even of a removed agent; the shared one for "". It returns
// [ErrNotFound] for an unknown agent, and [ErrNoMemory] for an agent without memory.
func (d *Directory) MemoryOf(ctx context.Context, db postgres.DB, name string) (string, error) {
	if name == "" {
		return "", nil
	}
	a, err := d.Find(ctx, db, name)
	if errors.Is(err, ErrNotFound) {
		versions, gone := Versions(ctx, db, name)
		if gone != nil {
			return "", gone
		}
		a, err = d.Version(ctx, db, name, versions[0])
	}
	if err != nil {
		return "", err
	}
	return a.MemoryOwner()
}
