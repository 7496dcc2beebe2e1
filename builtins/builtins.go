// Package builtins is the skills that come with the binary: what an agent can do with its own state in a
// workspace that declares nothing.
//
//	recall, memory_search  what the agent remembers (package memory)
//	memory_write           keep something, if the key is at the revision that the run has read, or new
//	memory_forget          drop something, if it is at the revision that the run has read; an admin is told
//	objectives_list        what it works towards, and how far it is (package objectives)
//	objective_propose      want something new, which an admin accepts or rejects
//	objective_update       note progress, if the objective is at the revision that the run has read, and plan further steps
//	objective_advance      report a step as done, which successful calls of the same run must show
//	automation_propose     want something done again and again, which an admin accepts
//	skill_list             what skills there are, and their state
//	recent_activity        what it did last, and how that went (package activity)
//	document_read          the text of a document that the run may read, piece by piece (package documents)
//
// Each is for the agent itself (scope internal). None changes what anybody may do: trust, scope, handler and enabled
// are not among what they write, and nothing here approves or accepts. Each is idempotent: it reads, or what it writes
// has a key, and a call that is made again after a crash finds its own work. What the caller got wrong has the class
// invalid_params and is no failure of the skill. A write to a memory or an objective's note that somebody else has
// changed answers with both values, and writes nothing ([IsConflict]); what a run has read is kept by who calls
// ([Sights], [Guarded]). An answer leaves out what would make it too long for a model and says how much that was.
//
// [New] is the code, for [skills.Options]; [Put] is the rows, for the database. They are two because a row
// outlives the process, and because a workspace may replace a row: Put never touches one of another source,
// so a workspace's skill of the same name wins. Put is safe in any number of processes at once, each row
// being one statement that the table's unique name decides.
package builtins

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// New returns the builtins by the name behind "builtin:". They work through pool. directory says whose memory
// they use; nil is an installation without settings. index searches the memory; nil searches by words alone.
func New(pool *pgxpool.Pool, directory *agents.Directory, index *memory.Index) map[string]skills.Builtin {
	directory = cmp.Or(directory, &agents.Directory{})
	recall := recalling(index)
	return map[string]skills.Builtin{
		"recall":             remembering(pool, directory, recall),
		"memory_search":      remembering(pool, directory, recall),
		"memory_write":       remembering(pool, directory, memoryWrite),
		"memory_forget":      remembering(pool, directory, memoryForget),
		"objectives_list":    reading(pool, objectivesList),
		"objective_propose":  writing(pool, objectivePropose),
		"objective_update":   writing(pool, objectiveUpdate),
		"objective_advance":  writing(pool, objectiveAdvance),
		"automation_propose": writing(pool, automationPropose),
		"skill_list":         reading(pool, skillList),
		"recent_activity":    reading(pool, recentActivity),
		"document_read":      reading(pool, documentRead),
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

// Put declares the builtins and returns how many rows that changed: none, when it was done before. A row that a
// workspace declared stays the workspace's.
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

// reading makes a builtin of a function that reads the database with arguments of type A.
func reading[A any](pool *pgxpool.Pool, read func(ctx context.Context, db postgres.DB, args A) (any, error)) skills.Builtin {
	return func(ctx context.Context, c skills.Call) (any, error) {
		args, err := arguments[A](c)
		if err != nil {
			return nil, err
		}
		return read(ctx, pool, args)
	}
}

// acting is on whose behalf something is written.
type acting struct{ TraceID, ExecutionID, Agent string }

// remembering makes a builtin of a function that works on the memory of the agent that acts.
func remembering[A any](
	pool *pgxpool.Pool, directory *agents.Directory,
	use func(ctx context.Context, db postgres.Beginner, who rememberer, args A) (any, error),
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
			return nil, mistake(err, agents.ErrNoMemory)
		}
		return use(ctx, pool, rememberer{memory.Owner(owner), string(span.TraceID)}, args)
	}
}

// rememberer is whose memory is used, and for which work.
type rememberer struct {
	owner   memory.Owner
	traceID string
}

// writing makes a builtin of a function that changes the database. It needs a trace, which says who did it.
func writing[A any](pool *pgxpool.Pool, write func(ctx context.Context, db postgres.Beginner, who acting, args A) (any, error)) skills.Builtin {
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

func arguments[A any](c skills.Call) (args A, err error) {
	if len(c.Args) > 0 {
		if err := json.Unmarshal(c.Args, &args); err != nil {
			return args, refuse("read arguments: " + err.Error())
		}
	}
	return args, nil
}
