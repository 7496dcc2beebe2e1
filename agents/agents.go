// Package agents stores the agents that a workspace declares (kind: agent), in the table agent_agents.
//
// A [Definition] has an agent's identity (instructions, languages, time zone), its permissions (model, skills,
// memory, delegates), its chat keys and its spending limits. It only restricts: the scopes, trust levels and limits
// of the installation also apply. Several agents share one database. A workspace with agents has one default, for
// requests without an agent.
//
// Without a declared agent, the installation is the agent AGENT_NAME, with the settings of the environment. A
// [Directory] finds agents and fills in defaults; [Agent.Values] returns the source of each value.
//
// Every applied version is stored. A turn records its version and finishes on it, in any process.
//
// Instructions are not templates: braces stay braces.
package agents

import (
	"errors"
	"path"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// ErrNotFound reports an unknown agent or version.
var ErrNotFound = errors.New("no such agent")

// Definition declares an agent in a workspace file. Only the name is required.
type Definition struct {
	Name        string `yaml:"name" json:"name"`
	Description string `yaml:"description" json:"description,omitempty"` // delegating agents read it
	Default     bool   `yaml:"default" json:"default,omitempty"`         // for requests without an agent

	Instructions     string `yaml:"instructions" json:"instructions,omitempty"` // verbatim
	InstructionsFile string `yaml:"instructions_file" json:"-"`                 // a file instead of them

	Model       string   `yaml:"model" json:"model,omitempty"`             // AGENT_MODEL when empty
	Fallback    []string `yaml:"fallback" json:"fallback,omitempty"`       // models if the first is unavailable, in order
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

// Limits bound an agent, in addition to the bounds of the installation. Zero fields bound nothing.
type Limits struct {
	Iterations int     `yaml:"iterations" json:"iterations,omitempty"` // model calls of one turn
	Tokens     int     `yaml:"tokens" json:"tokens,omitempty"`         // of one turn
	CostUSD    float64 `yaml:"cost_usd" json:"cost_usd,omitempty"`     // of one turn
	DayUSD     float64 `yaml:"day_usd" json:"day_usd,omitempty"`       // of a UTC day
}

// Heartbeat is the schedule of an agent, and its task besides the due work.
type Heartbeat struct {
	Cron   string `yaml:"cron" json:"cron,omitempty"`     // AGENT_HEARTBEAT_CRON when empty
	Prompt string `yaml:"prompt" json:"prompt,omitempty"` // a task for every heartbeat; empty costs no model call
}

// Agent is one version of an agent, with its defaults.
type Agent struct {
	Definition
	Version   int       `json:"version"` // 0: not declared, the installation's settings
	Source    string    `json:"source"`  // of the declaration; empty for none
	CreatedAt time.Time `json:"created_at,omitzero"`

	declared Definition
}

// Declared reports whether a workspace declares the agent.
func (a Agent) Declared() bool { return a.Version > 0 }

// AsDeclared returns the agent's document without defaults.
func (a Agent) AsDeclared() Definition { return a.declared }

// May reports whether the agent's document allows a skill. The skill's scope may still forbid it.
func (a Agent) May(skill string) bool {
	return a.Skills == nil || slices.ContainsFunc(a.Skills, func(pattern string) bool {
		match, err := path.Match(pattern, skill)
		return err == nil && match
	})
}

// reachedBy reports whether a chat key reaches the agent. bound means that some agent names the key.
func (a Agent) reachedBy(key string, bound bool) bool {
	if bound {
		return slices.Contains(a.Keys, key)
	}
	return a.Default
}

// Location returns the agent's time zone; UTC for an unknown one.
func (a Agent) Location() *time.Location {
	zone, err := schedule.Location(a.Timezone)
	if err != nil {
		return time.UTC
	}
	return zone
}

// Alias denotes the caller's default agent. Only the default agent may have this name.
const Alias = "agent"
