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

// Subject has the inputs of a run: a version of an agent with its skills, and a suite. It is stored with the run, so
// later changes do not affect the trials.
type Subject struct {
	Suite     Suite               `json:"suite"`
	Agent     agents.Definition   `json:"agent"` // as declared
	Version   int                 `json:"version"`
	Model     string              `json:"model"`
	Installed string              `json:"installed"` // the model of agents without one
	Effort    string              `json:"effort"`
	Delegates []agents.Definition `json:"delegates"` // names and descriptions
	Skills    []skills.Skill      `json:"skills"`    // the skills that the agent may call
	Runtime   string              `json:"runtime"`   // the version of this program
	Setup     string              `json:"setup"`     // identifies the settings of the model calls
}

// Installation has the inputs of a subject that are not in the database.
type Installation struct {
	Agents  *agents.Directory
	Model   string              // model of agents that declare none
	Offline bool                // Model answers for all agents
	Scopes  map[string][]string // of the skills of each surface
	Runtime string
	Setup   string
}

// Subject reads the subject of a new run of a suite.
func (in Installation) Subject(ctx context.Context, db postgres.DB, s Suite) (Subject, error) {
	return in.SubjectAt(ctx, db, s, 0)
}

// SubjectAt is Subject with another version of the agent; the current one for 0.
func (in Installation) SubjectAt(ctx context.Context, db postgres.DB, s Suite, version int) (Subject, error) {
	all, err := in.Agents.List(ctx, db)
	if err != nil {
		return Subject{}, err
	}
	agent, err := agents.Find(all, s.Definition.Agent)
	if err == nil && version > 0 {
		agent, err = in.Agents.Look(ctx, db, agent.Name, version)
	}
	if err != nil {
		return Subject{}, err
	}
	offered, err := skills.InScope(ctx, db, in.Scopes[s.Definition.SurfaceName()])
	if err != nil {
		return Subject{}, err
	}
	subject := Subject{
		Suite: s, Agent: agent.AsDeclared(), Version: agent.Version, Model: agent.Model, Effort: agent.Effort,
		Runtime: in.Runtime, Installed: in.Model, Setup: in.Setup,
	}
	subject.Agent.Name = agent.Name
	if subject.Model == "" || in.Offline {
		subject.Model = in.Model
	}
	for _, other := range all {
		if slices.Contains(agent.Delegates, other.Name) {
			subject.Delegates = append(subject.Delegates, agents.Definition{Name: other.Name, Description: other.Description})
		}
	}
	for _, skill := range offered {
		if agent.May(skill.Name) {
			subject.Skills = append(subject.Skills, describeSkill(skill))
		}
	}
	return subject, nil
}

// describeSkill returns the part of a skill that a model sees. Stubs answer its calls, so it omits handler and
// settings. It keeps the handlers of builtins, which identify the skills of the memory.
func describeSkill(s skills.Skill) skills.Skill {
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
	subjects := map[string]Subject{}
	for _, s := range suites {
		subject, err := in.Subject(ctx, db, s)
		if errors.Is(err, agents.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		subjects[s.Name] = subject
	}
	return subjects, nil
}

// AgentDigest identifies the agent as a trial sees it. It ignores heartbeat, keys, greeting and whether it is default.
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

// SuiteDigest identifies the cases of the suite. It ignores the number of trials, the budget and the gate.
func (s Subject) SuiteDigest() string {
	d := s.Suite.Definition
	return digest(Definition{Name: d.Name, Agent: d.Agent, Surface: d.Surface, Cases: d.Cases})
}

// digest returns a SHA-256 of a value's JSON, cut to 16 bytes. The value is decoded and encoded again first, as if a
// database had stored it.
func digest(value any) string {
	text, err := json.Marshal(value)
	var decoded any
	if err == nil {
		decoded, err = decodeExact(text)
	}
	if err == nil {
		text, err = json.Marshal(decoded)
	}
	if err != nil {
		return "invalid: " + err.Error() // the value was read from JSON
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// ReadSubject reads the subject of a run. The subject of a run by an early release has only the suite.
func ReadSubject(ctx context.Context, db postgres.DB, r Run) (Subject, error) {
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
