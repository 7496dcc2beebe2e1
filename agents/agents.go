// Package agents is who acts: the table agent_agents, which holds what a workspace declares as kind: agent.
//
// A [Definition] says who an agent is (instructions, languages, time zone), what it may use (model, skills, memory,
// delegates), who reaches it (chat keys) and what it may spend. Everything in it narrows: scopes, trust levels and
// limits of the installation hold beside it. Several agents share one database. Exactly one is the default, which acts
// wherever nobody names another.
//
// Without any declared agent the installation is one: AGENT_NAME, with the settings of the environment. A [Directory]
// finds agents and fills in what their documents leave out; [Agent.Values] says where each value comes from.
//
// Every version that was applied is kept. A turn records the version it began with and finishes on it, in whichever
// process.
//
// Instructions are never templates: braces in a text stay braces.
package agents

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// ErrNotFound reports an agent, or a version of one, that does not exist.
var ErrNotFound = errors.New("no such agent")

// The memories that an agent can have.
const (
	MemoryShared = "shared" // the default: all agents read and write one memory
	MemoryOwn    = "own"    // no other agent reads or writes it
	MemoryNone   = "none"
)

// Definition is what a workspace file declares about an agent. Only the name is required.
type Definition struct {
	Name        string `yaml:"name" json:"name"`
	Description string `yaml:"description" json:"description,omitempty"` // delegating agents read it
	Default     bool   `yaml:"default" json:"default,omitempty"`         // acts where nobody names an agent

	Instructions     string `yaml:"instructions" json:"instructions,omitempty"` // verbatim
	InstructionsFile string `yaml:"instructions_file" json:"-"`                 // a file instead of them

	Model       string   `yaml:"model" json:"model,omitempty"`             // AGENT_MODEL when empty
	Fallback    []string `yaml:"fallback" json:"fallback,omitempty"`       // models for 429, 5xx and silence, in order
	Effort      string   `yaml:"effort" json:"effort,omitempty"`           // AGENT_REASONING_EFFORT when empty
	Temperature *float64 `yaml:"temperature" json:"temperature,omitempty"` // 0 to 2; the model's own when nil

	Skills    []string   `yaml:"skills" json:"skills" nullable:"true"` // names or globs; all when nil, none when empty
	Memory    string     `yaml:"memory" json:"memory,omitempty"`       // MemoryShared when empty
	Pinned    []string   `yaml:"pinned" json:"pinned,omitempty"`       // category/key, always shown
	Delegates []string   `yaml:"delegates" json:"delegates,omitempty"` // agents that it may delegate to
	Keys      []string   `yaml:"keys" json:"keys,omitempty"`           // names of chat keys that reach it
	Languages []string   `yaml:"languages" json:"languages,omitempty"` // BCP 47 tags, the preferred first
	Timezone  string     `yaml:"timezone" json:"timezone,omitempty"`   // AGENT_TIMEZONE when empty
	Greeting  string     `yaml:"greeting" json:"greeting,omitempty"`   // begins a new thread, without a model call
	Limits    Limits     `yaml:"limits" json:"limits,omitzero"`        // tighten those of the installation
	Heartbeat *Heartbeat `yaml:"heartbeat" json:"heartbeat,omitempty"` // nil: only the default agent has one
}

// Limits bound an agent beside the installation's own bounds. Zero fields bound nothing.
type Limits struct {
	Iterations int     `yaml:"iterations" json:"iterations,omitempty"` // model calls of one turn
	Tokens     int     `yaml:"tokens" json:"tokens,omitempty"`         // of one turn
	CostUSD    float64 `yaml:"cost_usd" json:"cost_usd,omitempty"`     // of one turn
	DayUSD     float64 `yaml:"day_usd" json:"day_usd,omitempty"`       // of a UTC day
}

// Heartbeat is when an agent acts by itself, and what it does then beside what is due.
type Heartbeat struct {
	Cron   string `yaml:"cron" json:"cron,omitempty"`     // AGENT_HEARTBEAT_CRON when empty
	Prompt string `yaml:"prompt" json:"prompt,omitempty"` // a task for every heartbeat; empty costs no model call
}

// Agent is one version of an agent, with what its document leaves out filled in.
type Agent struct {
	Definition
	Version   int       `json:"version"` // 0: not declared, the installation's settings
	Source    string    `json:"source"`  // who declared it; empty: nobody
	CreatedAt time.Time `json:"created_at,omitzero"`

	declared Definition
}

// Declared reports whether a workspace declares the agent.
func (a Agent) Declared() bool { return a.Version > 0 }

// AsDeclared is the agent's document, nothing filled in.
func (a Agent) AsDeclared() Definition { return a.declared }

// May reports whether the agent may use a skill of this name, as far as its document says.
func (a Agent) May(skill string) bool {
	return a.Skills == nil || slices.ContainsFunc(a.Skills, func(pattern string) bool {
		match, err := path.Match(pattern, skill)
		return err == nil && match
	})
}

// MemoryOwner names the memory that the agent reads and writes: its own, or "" for the shared one. [ErrNoMemory] when
// it has none.
func (a Agent) MemoryOwner() (string, error) {
	switch a.Memory {
	case MemoryOwn:
		return a.Name, nil
	case MemoryNone:
		return "", fmt.Errorf("use memory of agent %s: %w", a.Name, ErrNoMemory)
	}
	return "", nil
}

// reachedBy reports whether a chat key of this name reaches the agent, where bound says whether any agent names the
// key.
func (a Agent) reachedBy(key string, bound bool) bool {
	if bound {
		return slices.Contains(a.Keys, key)
	}
	return a.Default
}

// Location is the agent's time zone; UTC when its name is unknown here.
func (a Agent) Location() *time.Location {
	zone, err := schedule.Location(a.Timezone)
	if err != nil {
		return time.UTC
	}
	return zone
}
