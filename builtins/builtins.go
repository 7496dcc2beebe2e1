// Package builtins holds the skills of the binary: an agent's access to its own state.
//
//	recall, memory_search  read the memory (package memory)
//	memory_write           store a value, if the key is new or at the revision that the run has read
//	memory_forget          delete an entry at the revision that the run has read
//	objectives_list        list objectives and their progress (package objectives)
//	objective_propose      propose an objective, which an admin accepts or rejects
//	objective_update       note progress at the revision that the run has read, and plan steps
//	objective_advance      complete a step, proven by successful calls of the same run
//	automation_propose     propose an automation, which an admin accepts
//	skill_list             list the skills and their state
//	recent_activity        list recent activities and their outcome (package activity)
//	document_read          read a document that the run may read, in pieces (package documents)
//
// All have scope internal. None changes a right: they write neither trust, scope, handler nor enabled, and approve
// nothing. All are idempotent: they read, or their write has a key, so a repeated call after a crash finds its own
// work. Invalid arguments have the class invalid_params and are no failure of the skill. A write to a changed memory
// entry or note is rejected, and the answer has both values ([IsConflict]). The caller tracks what a run has read
// ([Sights], [WithRevisions]). recall reports how many found entries exceed its size limit, skill_list how many skills
// exceed its limit.
//
// [New] is the code, for [skills.Options]; [Put] writes the rows. A row outlives the process, and a workspace may
// replace it: Put never changes a row of another source. Put is safe in concurrent processes, because each row is one
// statement on a unique name.
package builtins

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// New returns the builtins by the name after "builtin:". They use pool. directory finds the memory of an agent; nil
// is an installation without settings. index searches the memory; nil searches by words alone.
func New(pool *pgxpool.Pool, directory *agents.Directory, index *memory.Index) map[string]skills.Builtin {
	directory = cmp.Or(directory, &agents.Directory{})
	recall := recallHandler(index)
	return map[string]skills.Builtin{
		"recall":             withMemory(pool, directory, recall),
		"memory_search":      withMemory(pool, directory, recall),
		"memory_write":       withMemory(pool, directory, memoryWrite),
		"memory_forget":      withMemory(pool, directory, memoryForget),
		"objectives_list":    readOnly(pool, objectivesList),
		"objective_propose":  withWrite(pool, objectivePropose),
		"objective_update":   withWrite(pool, ownedObjective(directory, objectiveUpdate)),
		"objective_advance":  withWrite(pool, ownedObjective(directory, objectiveAdvance)),
		"automation_propose": withWrite(pool, automationPropose),
		"skill_list":         readOnly(pool, skillList),
		"recent_activity":    readOnly(pool, recentActivity),
		"document_read":      readOnly(pool, documentRead),
	}
}

// Names are the builtins, sorted.
func Names() []string {
	var names []string
	for _, d := range definitions() {
		names = append(names, d.Name)
	}
	return names
}

// Put declares the builtins and returns the number of changed rows. A declaration of a workspace stays.
func Put(ctx context.Context, db postgres.DB) (changed int, err error) {
	for _, d := range definitions() {
		did, err := skills.Put(ctx, db, d, skills.SourceBuiltin)
		if err != nil {
			return changed, fmt.Errorf("declare builtins: %w", err)
		}
		if did {
			changed++
		}
	}
	return changed, nil
}

// readOnly makes a builtin of a function that reads the database with arguments of type A.
func readOnly[A any](
	pool *pgxpool.Pool, read func(ctx context.Context, db postgres.DB, args A) (any, error),
) skills.Builtin {
	return func(ctx context.Context, c skills.Call) (any, error) {
		args, err := arguments[A](c)
		if err != nil {
			return nil, err
		}
		return read(ctx, pool, args)
	}
}

// withWrite makes a builtin of a function that changes the database. It needs a trace, for the audit.
func withWrite[A any](
	pool *pgxpool.Pool, write func(ctx context.Context, db postgres.Beginner, who acting, args A) (any, error),
) skills.Builtin {
	return func(ctx context.Context, c skills.Call) (any, error) {
		args, err := arguments[A](c)
		if err != nil {
			return nil, err
		}
		span, ok := trace.From(ctx)
		if !ok {
			return nil, fmt.Errorf("call %s: it is not part of any trace", c.Skill.Name)
		}
		return write(ctx, pool, acting{string(span.TraceID), span.ExecutionID, cmp.Or(span.Agent, "agent")}, args)
	}
}

// acting identifies the run that calls a builtin.
type acting struct{ TraceID, ExecutionID, Agent string }

// withMemory makes a builtin of a function that uses the memory of the acting agent.
func withMemory[A any](
	pool *pgxpool.Pool, directory *agents.Directory,
	use func(ctx context.Context, db postgres.Beginner, who memoryUser, args A) (any, error),
) skills.Builtin {
	return func(ctx context.Context, c skills.Call) (any, error) {
		args, err := arguments[A](c)
		if err != nil {
			return nil, err
		}
		span, ok := trace.From(ctx)
		if !ok && writesMemory(c.Skill) {
			return nil, fmt.Errorf("call %s: it is not part of any trace", c.Skill.Name)
		}
		owner, err := directory.ActingMemory(ctx, pool, span.Agent)
		if err != nil {
			return nil, invalidIf(err, agents.ErrNoMemory)
		}
		return use(ctx, pool, memoryUser{memory.Owner(owner), string(span.TraceID)}, args)
	}
}

// memoryUser identifies the memory and the writer.
type memoryUser struct {
	owner   memory.Owner
	traceID string
}

func arguments[A any](c skills.Call) (args A, err error) {
	if len(c.Args) > 0 {
		if err := json.Unmarshal(c.Args, &args); err != nil {
			return args, invalid("read arguments: " + err.Error())
		}
	}
	return args, nil
}

const (
	defaultLimit = 10
	maxLimit     = 50
)

// classInvalid marks invalid arguments, which are no failure of the skill.
const classInvalid = "invalid_params"

// invalidIf converts err to an error of the class classInvalid if it is one of mistakes.
func invalidIf(err error, mistakes ...error) error {
	for _, m := range mistakes {
		if errors.Is(err, m) {
			return &skills.CallError{Class: classInvalid, Message: err.Error()}
		}
	}
	return err
}

func invalid(text string) error { return &skills.CallError{Class: classInvalid, Message: text} }
