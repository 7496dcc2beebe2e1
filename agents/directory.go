package agents

import (
	"cmp"
	"context"
	"fmt"
	"slices"

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

// Directory finds agents. It caches nothing, so a change applies from the next turn on. It is safe for concurrent use.
// The zero value is an installation without settings.
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

// Acting returns the agent that an execution's row names, or the default agent if there is no such agent.
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

// Of returns the agent of a document that the caller has stored, with the defaults. Version 0 is the agent of the
// installation.
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
	r.Definition.Name = cmp.Or(r.Name, r.Definition.Name) // the column is the name, if there is a row
	a := Agent{
		Definition: r.Definition, Version: r.Version, Source: r.Source, CreatedAt: r.CreatedAt, declared: r.Definition,
	}
	a.Model = cmp.Or(a.Model, d.Settings.Model)
	if a.Temperature == nil { // models that reason take no temperature
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
