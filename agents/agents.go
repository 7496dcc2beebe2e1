// Package agents stores the agents that a workspace declares (kind: agent), in the table agent_agents.
//
// A [Definition] has an agent's identity (instructions, languages, time zone), its permissions (model, skills,
// memory, delegates), its chat keys and its spending limits. It only restricts: the scopes, trust levels and limits
// of the installation also apply. Several agents share one database. Exactly one is the default, for requests without
// an agent.
//
// Without a declared agent, the installation is the agent AGENT_NAME, with the settings of the environment. A
// [Directory] finds agents and fills in defaults; [Agent.Values] returns the source of each value.
//
// Every applied version is stored. A turn records its version and finishes on it, in any process.
//
// Instructions are not templates: braces stay braces.
package agents

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"golang.org/x/text/language"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

// ErrNotFound reports an unknown agent or version.
var ErrNotFound = errors.New("no such agent")

// The memories that an agent can have.
const (
	MemoryShared = "shared" // the default: all agents read and write one memory
	MemoryOwn    = "own"    // no other agent reads or writes it
	MemoryNone   = "none"
)

// Definition declares an agent in a workspace file. Only the name is required.
type Definition struct {
	Name        string `yaml:"name" json:"name"`
	Description string `yaml:"description" json:"description,omitempty"` // delegating agents read it
	Default     bool   `yaml:"default" json:"default,omitempty"`         // for requests without an agent

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

// May reports whether the agent's document allows a skill.
func (a Agent) May(skill string) bool {
	return a.Skills == nil || slices.ContainsFunc(a.Skills, func(pattern string) bool {
		match, err := path.Match(pattern, skill)
		return err == nil && match
	})
}

// MemoryOwner returns the owner of the agent's memory; empty for the shared one. It returns [ErrNoMemory] without a
// memory.
func (a Agent) MemoryOwner() (string, error) {
	switch a.Memory {
	case MemoryOwn:
		return a.Name, nil
	case MemoryNone:
		return "", fmt.Errorf("use memory of agent %s: %w", a.Name, ErrNoMemory)
	}
	return "", nil
}

// reachedBy reports whether a chat key reaches the agent. bound: an agent names the key.
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

// Value is an effective value of an agent, with its source.
type Value struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	From  string `json:"from"` // document, the name of a setting, or default
}

// Sources of a value, beside the names of settings.
const (
	fromDocument = "document"
	fromDefault  = "default"
)

// Values lists the effective values of an agent in the order of its document. Of instructions it gives the length.
func (a Agent) Values() []Value {
	d := a.declared
	v := &values{}
	v.add("name", a.Name, a.Declared(), "AGENT_NAME")
	v.add("description", a.Description, d.Description != "", "")
	v.add("instructions", size(a.Instructions), d.Instructions != "", "")
	v.add("model", a.Model, d.Model != "", "AGENT_MODEL")
	v.add("fallback", list(a.Fallback), len(d.Fallback) > 0, "")
	v.add("effort", a.Effort, d.Effort != "", "AGENT_REASONING_EFFORT")
	v.add("temperature", number(a.Temperature), d.Temperature != nil, "")
	v.add("skills", a.skills(), d.Skills != nil, "")
	v.add("memory", a.Memory, d.Memory != "", "")
	v.add("pinned", list(a.Pinned), len(d.Pinned) > 0, "")
	v.add("delegates", list(a.Delegates), len(d.Delegates) > 0, "")
	v.add("keys", a.keys(), len(d.Keys) > 0, "")
	v.add("languages", list(a.Languages), len(d.Languages) > 0, "")
	v.add("timezone", a.Timezone, d.Timezone != "", "AGENT_TIMEZONE")
	v.add("greeting", a.Greeting, d.Greeting != "", "")
	v.limits(a.Limits, d.Limits)
	if h := a.Heartbeat; h != nil {
		v.add("heartbeat.cron", h.Cron, d.Heartbeat != nil && d.Heartbeat.Cron != "", "AGENT_HEARTBEAT_CRON")
		v.add("heartbeat.prompt", h.Prompt, h.Prompt != "", "")
	} else {
		v.add("heartbeat", "", false, "")
	}
	return v.list
}

type values struct{ list []Value }

// add adds a value; an empty one is the default none.
func (v *values) add(name, value string, declared bool, setting string) {
	from := fromDefault
	switch {
	case declared:
		from = fromDocument
	case setting != "" && value != "":
		from = setting
	}
	value = cmp.Or(value, "none")
	v.list = append(v.list, Value{Name: name, Value: value, From: from})
}

func (v *values) limits(effective, declared Limits) {
	for _, limit := range []struct {
		name, setting       string
		effective, declared float64
	}{
		{"iterations", "AGENT_MAX_ITERATIONS", float64(effective.Iterations), float64(declared.Iterations)},
		{"tokens", "AGENT_MAX_TOKENS", float64(effective.Tokens), float64(declared.Tokens)},
		{"cost_usd", "AGENT_MAX_COST_USD", effective.CostUSD, declared.CostUSD},
		{"day_usd", "AGENT_BUDGET_DAY_USD", effective.DayUSD, declared.DayUSD},
	} {
		value := ""
		if limit.effective > 0 {
			value = strconv.FormatFloat(limit.effective, 'f', -1, 64)
		}
		v.add("limits."+limit.name, value, limit.declared > 0 && limit.declared == limit.effective, limit.setting)
	}
}

func (a Agent) skills() string {
	if a.Skills == nil {
		return "all that their scopes allow"
	}
	return list(a.Skills)
}

func (a Agent) keys() string {
	if len(a.Keys) == 0 && a.Default {
		return "all that no agent names"
	}
	return list(a.Keys)
}

func list(values []string) string { return strings.Join(values, ", ") }

func number(n *float64) string {
	if n == nil {
		return ""
	}
	return fmt.Sprintf("%g", *n)
}

func size(text string) string {
	if text == "" {
		return ""
	}
	return fmt.Sprintf("%d bytes", len(text))
}

// Shown is an agent with the sources of its values.
type Shown struct {
	Agent
	Values   []Value `json:"values"`
	Versions []int   `json:"versions"` // the newest first; empty for the installation's own agent
}

// MissingError reports a requested agent or version that does not exist. It is an [ErrNotFound].
type MissingError struct {
	Name    string
	Version int    // 0: the current one
	Latest  int    // latest version; 0 for an agent that never existed
	Near    string // an agent whose name is like it; empty: none
	Own     bool   // the installation's own agent, which has no versions
}

// Error contains no advice, because the command line and HTTP list agents differently.
func (e *MissingError) Error() string {
	switch {
	case e.Own:
		return fmt.Sprintf("agent %s has no version %d: it is not declared, so it has no versions", e.Name, e.Version)
	case e.Latest == 0 && e.Near != "":
		return fmt.Sprintf("there is no agent %.100q, did you mean %q?", e.Name, e.Near)
	case e.Latest == 0:
		return fmt.Sprintf("there is no agent %.100q", e.Name)
	case e.Version > 0:
		return fmt.Sprintf("agent %s has no version %d: the latest is %d", e.Name, e.Version, e.Latest)
	}
	return fmt.Sprintf("agent %s was removed", e.Name)
}

// Is reports the error as an [ErrNotFound].
func (e *MissingError) Is(target error) bool { return target == ErrNotFound }

// Look returns the current version of an agent for number 0, or the given version, also of a removed agent. It returns
// a [MissingError] for none.
func (d *Directory) Look(ctx context.Context, db postgres.DB, name string, number int) (Agent, error) {
	find := func() (Agent, error) { return d.Find(ctx, db, name) }
	if number > 0 {
		find = func() (Agent, error) { return d.Version(ctx, db, name, number) }
	}
	a, err := find()
	if errors.Is(err, ErrNotFound) {
		err = d.missing(ctx, db, name, number)
	}
	return a, err
}

// Show is [Directory.Look] with the values and versions of the agent.
func (d *Directory) Show(ctx context.Context, db postgres.DB, name string, number int) (Shown, error) {
	a, err := d.Look(ctx, db, name, number)
	if err != nil {
		return Shown{}, err
	}
	shown := Shown{Agent: a, Values: a.Values(), Versions: []int{}}
	if a.Declared() {
		shown.Versions, err = Versions(ctx, db, a.Name)
	}
	return shown, err
}

// missing returns the error for an agent that does not exist.
func (d *Directory) missing(ctx context.Context, db postgres.DB, name string, number int) error {
	versions, err := Versions(ctx, db, name)
	if err == nil {
		return &MissingError{Name: name, Version: number, Latest: versions[0]}
	}
	if !errors.Is(err, ErrNotFound) {
		return err
	}
	all, err := d.List(ctx, db)
	if err != nil {
		return err
	}
	names := make([]string, len(all))
	for i, a := range all {
		if names[i] = a.Name; a.Name == name {
			return &MissingError{Name: name, Version: number, Own: true}
		}
	}
	return &MissingError{Name: name, Near: nearest.To(name, names)}
}

// Bounds of a definition.
const (
	maxInstructions = 64 << 10 // bytes
	maxText         = 8192     // bytes of a description, greeting or heartbeat prompt
	maxList         = 100      // entries of any list
)

// Alias denotes the caller's default agent. Only the default agent may have this name.
const Alias = "agent"

var (
	validName  = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)
	validModel = regexp.MustCompile(`^[!-~]{1,200}$`)
)

// Validate returns all problems of d, each as "field path: problem", joined by [errors.Join]. It does not check that
// the named skills, agents and keys exist.
func Validate(d Definition) error {
	v := &validator{}
	v.name(d)
	v.texts(d)
	v.model(d)
	v.lists(d)
	v.limits(d.Limits)
	v.schedule(d)
	return errors.Join(v.List...)
}

type validator struct{ fielderr.List }

func (v *validator) name(d Definition) {
	switch {
	case d.Name == "":
		v.Add("name", "is empty")
	case !validName.MatchString(d.Name):
		v.Add("name", "%q must begin with a letter and have 1 to 64 of the characters a-z A-Z 0-9 _ -", d.Name)
	case d.Name == Alias && !d.Default:
		v.Add("name", "%q is the name of the default agent for clients; choose another name, or add default: true", d.Name)
	}
}

func (v *validator) texts(d Definition) {
	if d.Instructions != "" && d.InstructionsFile != "" {
		v.Add("instructions_file", "there are instructions, too; keep one of the two")
	}
	for _, text := range []struct {
		field, value string
		most         int
	}{
		{"instructions", d.Instructions, maxInstructions},
		{"description", d.Description, maxText},
		{"greeting", d.Greeting, maxText},
	} {
		if len(text.value) > text.most || strings.ContainsRune(text.value, 0) {
			v.Add(text.field, "must have at most %d bytes and no NUL character", text.most)
		}
	}
}

func (v *validator) model(d Definition) {
	for i, name := range append([]string{d.Model}, d.Fallback...) {
		field := "model"
		if i > 0 {
			field = fmt.Sprintf("fallback[%d]", i-1)
		}
		if (name != "" || i > 0) && !validModel.MatchString(name) {
			v.Add(field, "%q is not the name of a model: printable characters without blanks", name)
		}
	}
	if d.Effort != "" && !slices.Contains(config.Efforts(), d.Effort) {
		v.Add("effort", "%q is none of %s", d.Effort, strings.Join(config.Efforts(), ", "))
	}
	if t := d.Temperature; t != nil && !(*t >= 0 && *t <= 2) {
		v.Add("temperature", "must be between 0 and 2")
	}
	if d.Temperature != nil && d.Effort != "" && d.Effort != "none" {
		v.Add("temperature", "models that reason take none; keep effort or temperature")
	}
}

func (v *validator) lists(d Definition) {
	v.list("skills", d.Skills, "a name of a skill, or a pattern such as memory_*", func(s string) bool {
		_, err := path.Match(s, "x")
		return s != "" && err == nil
	})
	v.list("pinned", d.Pinned, "category/key", func(s string) bool {
		category, key, ok := strings.Cut(s, "/")
		return ok && category != "" && key != "" && !strings.ContainsFunc(s, unicode.IsControl)
	})
	v.list("delegates", d.Delegates, "a name of another agent", func(s string) bool {
		return validName.MatchString(s) && s != d.Name
	})
	v.list("keys", d.Keys, "a name of a chat key", func(s string) bool { return strings.TrimSpace(s) == s && s != "" })
	v.list("languages", d.Languages, "a language tag such as es or pt-BR", func(s string) bool {
		_, err := language.Parse(s)
		return err == nil
	})
	if d.Memory != "" && !slices.Contains([]string{MemoryShared, MemoryOwn, MemoryNone}, d.Memory) {
		v.Add("memory", "%q is none of %s, %s, %s", d.Memory, MemoryShared, MemoryOwn, MemoryNone)
	}
	if d.Memory == MemoryNone && len(d.Pinned) > 0 {
		v.Add("pinned", "an agent without memory has nothing to pin")
	}
}

func (v *validator) list(field string, values []string, wanted string, ok func(string) bool) {
	if len(values) > maxList {
		v.Add(field, "has %d entries; at most %d are taken", len(values), maxList)
	}
	for i, s := range values {
		switch {
		case len(s) > 600 || !ok(s):
			v.Add(fmt.Sprintf("%s[%d]", field, i), "%.60q is not %s", s, wanted)
		case slices.Contains(values[:i], s):
			v.Add(fmt.Sprintf("%s[%d]", field, i), "%q is there twice", s)
		}
	}
}

func (v *validator) limits(l Limits) {
	for _, limit := range []struct {
		field string
		value float64
	}{
		{"iterations", float64(l.Iterations)},
		{"tokens", float64(l.Tokens)},
		{"cost_usd", l.CostUSD},
		{"day_usd", l.DayUSD},
	} {
		if limit.value < 0 {
			v.Add("limits."+limit.field, "must not be negative; leave it out for no limit of the agent's own")
		}
	}
}

func (v *validator) schedule(d Definition) {
	zone, err := schedule.Location(d.Timezone)
	if err != nil {
		v.Add("timezone", "%s", err)
	}
	if d.Heartbeat == nil {
		return
	}
	if len(d.Heartbeat.Prompt) > maxText || strings.ContainsRune(d.Heartbeat.Prompt, 0) {
		v.Add("heartbeat.prompt", "must have at most %d bytes and no NUL character", maxText)
	}
	if d.Heartbeat.Cron == "" || err != nil {
		return
	}
	if _, err := schedule.Parse(d.Heartbeat.Cron, zone); err != nil {
		v.Add("heartbeat.cron", "%s", err)
	}
}
