package evals

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Subject is the subject of a run: a version of an agent with its skills, and a suite. The run keeps it, so no later
// change reaches its trials.
type Subject struct {
	Suite     Suite               `json:"suite"`
	Agent     agents.Definition   `json:"agent"` // as declared
	Version   int                 `json:"version"`
	Model     string              `json:"model"`
	Installed string              `json:"installed"` // the model of agents without one
	Effort    string              `json:"effort"`
	Delegates []agents.Definition `json:"delegates"` // names and descriptions
	Skills    []skills.Skill      `json:"skills"`    // those that the agent may call, without the tools that call them
	Runtime   string              `json:"runtime"`   // the version of this program
	Setup     string              `json:"setup"`     // identifies the settings of the model calls
}

// Installation has the dependencies of a subject outside the database.
type Installation struct {
	Agents  *agents.Directory
	Model   string              // of agents without one
	Offline bool                // Model answers for all agents
	Scopes  map[string][]string // of the skills of each surface
	Runtime string
	Setup   string
}

// Subject reads the subject of a future run of a suite, in the state that db shows.
func (in Installation) Subject(ctx context.Context, db postgres.DB, s Suite) (Subject, error) {
	return in.SubjectAt(ctx, db, s, 0)
}

// SubjectAt is Subject with another version of the agent; the current one for 0.
func (in Installation) SubjectAt(ctx context.Context, db postgres.DB, s Suite, version int) (Subject, error) {
	all, err := in.Agents.List(ctx, db)
	if err != nil {
		return Subject{}, err
	}
	who, err := agents.Find(all, s.Definition.Agent)
	if err == nil && version > 0 {
		who, err = in.Agents.Look(ctx, db, who.Name, version)
	}
	if err != nil {
		return Subject{}, err
	}
	offered, err := skills.InScope(ctx, db, in.Scopes[s.Definition.SurfaceName()])
	if err != nil {
		return Subject{}, err
	}
	found := Subject{
		Suite: s, Agent: who.AsDeclared(), Version: who.Version, Model: who.Model, Effort: who.Effort, Runtime: in.Runtime,
		Installed: in.Model, Setup: in.Setup,
	}
	found.Agent.Name = who.Name
	if found.Model == "" || in.Offline {
		found.Model = in.Model
	}
	for _, other := range all {
		if slices.Contains(who.Delegates, other.Name) {
			found.Delegates = append(found.Delegates, agents.Definition{Name: other.Name, Description: other.Description})
		}
	}
	for _, skill := range offered {
		if who.May(skill.Name) {
			found.Skills = append(found.Skills, described(skill))
		}
	}
	return found, nil
}

// described returns a skill's description for a model. Stubs answer its calls, so it omits the handler and the
// settings. The handlers of builtins stay: they distinguish the memory's skills from others.
func described(s skills.Skill) skills.Skill {
	handler := s.Handler
	if !strings.HasPrefix(handler, "builtin:") {
		handler = "builtin:stub"
	}
	return skills.Skill{
		Name: s.Name, Description: s.Description, ToolDefinition: s.ToolDefinition, Handler: handler, Scope: s.Scope,
		Trust: s.Trust, Idempotent: s.Idempotent, Enabled: true,
	}
}

// Subjects reads the current suites by name, with the subject of each. It omits a suite whose agent no longer exists.
func (in Installation) Subjects(ctx context.Context, db postgres.DB) (map[string]Subject, error) {
	suites, err := List(ctx, db)
	if err != nil {
		return nil, err
	}
	all := map[string]Subject{}
	for _, s := range suites {
		found, err := in.Subject(ctx, db, s)
		if errors.Is(err, agents.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all[s.Name] = found
	}
	return all, nil
}

// AgentDigest identifies the agent as a trial sees it. Its schedule, keys and greeting do not count.
func (s Subject) AgentDigest() string {
	a := s.Agent
	a.Default, a.Keys, a.Greeting, a.Heartbeat = false, nil, "", nil
	return digest(struct {
		Agent         agents.Definition
		Model, Effort string
		Delegates     []agents.Definition
		Skills        []skills.Skill
	}{a, s.Model, s.Effort, s.Delegates, s.Skills})
}

// SuiteDigest identifies the cases of the suite. Its number of trials, budget and gate do not count.
func (s Subject) SuiteDigest() string {
	d := s.Suite.Definition
	return digest(Definition{Name: d.Name, Agent: d.Agent, Surface: d.Surface, Cases: d.Cases})
}

// digest is the SHA-256 of a value's JSON, after a round trip through JSON, as a database makes it.
func digest(value any) string {
	text, err := json.Marshal(value)
	var plain any
	if err == nil {
		err = json.Unmarshal(text, &plain)
	}
	if err == nil {
		text, err = json.Marshal(plain)
	}
	if err != nil {
		return "invalid: " + err.Error() // the value was read from JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// SubjectOf reads the subject of a run. For a run of an earlier release, it has only the suite.
func SubjectOf(ctx context.Context, db postgres.DB, r Run) (Subject, error) {
	var raw json.RawMessage
	err := db.QueryRow(ctx, `select subject from agent_eval_runs where id = @id`, postgres.Strict{"id": r.ID}).Scan(&raw)
	if err != nil {
		return Subject{}, fmt.Errorf("read the subject of run %s: %w", r.ID, err)
	}
	var s Subject
	if raw == nil {
		s.Suite, err = Version(ctx, db, r.Suite, r.Version)
		return s, err
	}
	if err := json.Unmarshal(raw, &s); err != nil {
		return s, fmt.Errorf("read the subject of run %s: %w", r.ID, err)
	}
	return s, nil
}
