// Package automations stores the agent's automations and their runs: the tables agent_automations and
// agent_automation_runs.
//
// An automation calls a skill, starts a flow, or gives the model a goal, on one of three triggers:
//
//	cron    a time of a schedule. The run's unique key is the claim: one of several processes inserts the row
//	        ([Claim]), and the same transaction moves the automation to its next time. All missed times cause one run:
//	        the next time is the first after the database's now.
//	event   a row in agent_events. A database trigger inserts a due run in the event's transaction. The run is skipped
//	        if its condition over the event and the counters is false.
//	signal  a condition over the counters that becomes true ([Watch]).
//
// Every run is claimed before it starts ([Claim], [ClaimRun]), by one of several callers. A crash leaves the claimed
// row. Package runner runs claimed runs.
//
// The agent may propose an automation ([Propose]). It is disabled until an admin accepts it ([Accept]), or a
// declaration takes its name ([Put]).
//
// [Abandoned] finds runs whose execution was cancelled or failed. [Finish] ends them as failures.
//
// A failed run is retried with growing pauses until the automation's attempts are used up. Then it is dead: an admin
// can read it ([Runs]) and retry it ([Redrive]).
//
// Disabling a skill pauses its automations, and enabling it resumes exactly those ([PausedFor]). An automation that an
// admin disabled stays disabled. The database does both.
package automations

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

var (
	// ErrNotFound reports an unknown automation.
	ErrNotFound = errors.New("automation not found")
	// ErrRunNotFound reports an unknown run.
	ErrRunNotFound = errors.New("automation run not found")
	// ErrNameTaken reports a proposal under the name of another automation.
	ErrNameTaken = errors.New("an automation of this name exists with another definition")
	// ErrTooMany reports that too many proposals are undecided.
	ErrTooMany = errors.New("too many proposals are undecided")
	// ErrProposal reports an undecided proposal.
	ErrProposal = errors.New("it is a proposal; accept it first")
	// ErrSkillDisabled reports an automation with a disabled skill. Nothing was changed.
	ErrSkillDisabled = errors.New("its skill is disabled")
)

// Triggers.
const (
	Cron   = "cron"
	Event  = "event"
	Signal = "signal"
)

// Manual is the cause of a run that an admin started; the others are the triggers.
const Manual = "manual"

// SelfHeal is the disabled_by of an automation paused for a skill that self-heal disabled.
const SelfHeal = "self_heal"

// Proposal is the disabled_by of an undecided proposal.
const Proposal = "proposal"

// SourceAgent is the source of automations that the agent proposes. The source of other automations is a workspace
// file.
const SourceAgent = "agent"

// Automation is a row of agent_automations.
type Automation struct {
	ID             string          `json:"id"`
	Name           string          `json:"name"`
	Description    string          `json:"description"`
	Agent          string          `json:"agent"` // agent of its runs; empty for the default agent
	Trigger        string          `json:"trigger"`
	Cron           string          `json:"cron"`
	Timezone       string          `json:"timezone"`
	Event          string          `json:"event"`
	Condition      string          `json:"condition"`    // over the event and the counters; empty is true
	Signal         string          `json:"signal"`       // over the counters
	SignalArmed    bool            `json:"signal_armed"` // the signal was false since it last fired
	SkillName      string          `json:"skill_name"`
	Arguments      json.RawMessage `json:"arguments"`
	Prompt         string          `json:"prompt"`
	Flow           string          `json:"flow"`
	MaxAttempts    int             `json:"max_attempts"`
	Enabled        bool            `json:"enabled"`
	DisabledReason string          `json:"disabled_reason"`
	DisabledBy     string          `json:"disabled_by"`
	DisabledAt     *time.Time      `json:"disabled_at"`
	PausedFor      string          `json:"paused_for"`  // the disabled skill that paused it
	ProposedBy     string          `json:"proposed_by"` // the agent; empty for a declaration
	DecidedBy      string          `json:"decided_by"`  // the admin; or the source of the declaration that accepted it
	// Revision increases with each change, except of SignalArmed, NextRunAt, LastRunAt, LastTraceID and UpdatedAt.
	Revision    int        `json:"revision"`
	NextRunAt   *time.Time `json:"next_run_at"` // nil for events and signals
	LastRunAt   *time.Time `json:"last_run_at"`
	LastTraceID string     `json:"last_trace_id"`
	Source      string     `json:"source"`
	CreatedAt   time.Time  `json:"created_at"`
	UpdatedAt   time.Time  `json:"updated_at"`
}

// PausedFor lists the automations that are paused for a skill, by name. The database pauses them when the skill is
// disabled, and resumes them when it is enabled. Times of the schedule that passed meanwhile cause one run.
func PausedFor(ctx context.Context, db postgres.DB, skill string) ([]string, error) {
	return postgres.Names(ctx, db, "list automations paused for skill "+skill, `
		select name from agent_automations where skill_name = @skill and paused_for = @skill and not enabled`,
		pgx.StrictNamedArgs{"skill": skill})
}

// Enable enables an automation, for any disabled_by. It returns false if the automation is enabled already. It returns
// [ErrNotFound] for an unknown automation, [ErrProposal] for an undecided proposal, and [ErrSkillDisabled] while its
// skill is disabled.
func Enable(ctx context.Context, db postgres.DB, nameOrID string) (bool, error) {
	a, err := Get(ctx, db, nameOrID)
	if err != nil {
		return false, err
	}
	tag, err := db.Exec(ctx, `
		update agent_automations a
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, paused_for = '',
		       updated_at = clock_timestamp()
		 where a.id = @id and not a.enabled and a.disabled_by <> 'proposal'
		   and not exists (select from agent_skills k where k.name = a.skill_name and not k.enabled)`,
		pgx.StrictNamedArgs{"id": a.ID})
	if err != nil {
		return false, fmt.Errorf("enable automation %q: %w", nameOrID, err)
	}
	a, err = Get(ctx, db, a.ID)
	switch {
	case err != nil:
		return false, err
	case a.DisabledBy == Proposal:
		return false, fmt.Errorf("enable automation %q: %w", nameOrID, ErrProposal)
	case !a.Enabled:
		return false, fmt.Errorf("enable automation %q: %w; run agent skills enable %s first", nameOrID, ErrSkillDisabled,
			a.SkillName)
	}
	return tag.RowsAffected() > 0, nil
}

// Disable disables an automation for an admin, so it does not resume with its skill. For a proposal, that is the
// rejection. It returns false if an admin has disabled the automation already, and [ErrNotFound] for an unknown one.
func Disable(ctx context.Context, db postgres.DB, nameOrID, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" || by == SelfHeal || by == Proposal {
		return false, fmt.Errorf("disable automation %q: an admin is required", nameOrID)
	}
	a, err := Get(ctx, db, nameOrID)
	if err != nil {
		return false, err
	}
	tag, err := db.Exec(ctx, `
		update agent_automations
		   set enabled = false, disabled_by = @by, disabled_reason = @reason, disabled_at = clock_timestamp(),
		       paused_for = '', decided_by = case when disabled_by = 'proposal' then @by else decided_by end,
		       updated_at = clock_timestamp()
		 where id = @id and (enabled or paused_for <> '' or disabled_by = 'proposal')`,
		pgx.StrictNamedArgs{"id": a.ID, "by": truncate(by), "reason": truncate(reason)})
	return postgres.Changed(tag, err, fmt.Sprintf("disable automation %q", nameOrID))
}

// LockRevision locks an automation until the transaction ends. It returns a [*postgres.StaleError] if the automation
// has another revision, and [ErrNotFound] if it is unknown. For revision 0, LockRevision does nothing.
func LockRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	return postgres.LockRevision(ctx, tx, "automation", `
		select revision from agent_automations where name = @name or id::text = @name
		 order by id::text = @name desc limit 1 for update`, name, revision, ErrNotFound)
}

const (
	defaultPage = 100
	maxPage     = 1000
)

// Filter narrows [List]; the zero value lists the newest 100.
type Filter struct {
	Enabled *bool
	Skill   string
	Source  string
	Before  string // an id; returns only older rows
	Limit   int    // 100 when 0, at most 1000
}

const automationColumns = `id, name, description, agent, trigger, cron, timezone, event, condition, signal, signal_armed,
	skill_name, arguments, prompt, flow, max_attempts, enabled, disabled_reason, disabled_by, disabled_at, paused_for,
	proposed_by, decided_by, revision, next_run_at, last_run_at, last_trace_id, source, created_at, updated_at`

// Listed is an automation with its due runs.
type Listed struct {
	Automation
	RunsDue     int64      `json:"runs_due"`      // counted up to MaxDue
	OldestDueAt *time.Time `json:"oldest_due_at"` // since when the oldest due run waits; nil without one
}

// MaxDue bounds the count of an automation's due runs.
const MaxDue = 10_000

// joinDueRuns joins automation a with its due runs, counted up to @max_due: those that wait, and failed ones whose
// retry is due.
const joinDueRuns = ` cross join lateral (
	  select count(*) as runs_due, min(coalesce(q.retry_at, q.created_at)) as oldest_due_at
	    from (select r.retry_at, r.created_at
	            from agent_automation_runs r
	           where r.automation_id = a.id and r.status in ('due', 'error')
	             and coalesce(r.retry_at, r.created_at) <= statement_timestamp()
	           order by coalesce(r.retry_at, r.created_at), r.id limit @max_due) q) d`

// List returns automations, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Listed, error) {
	return postgres.Rows[Listed](ctx, db, "list automations", `
		select `+automationColumns+`, runs_due, oldest_due_at
		  from (select *
		          from agent_automations
		         where (@enabled::boolean is null or enabled = @enabled) and (@skill = '' or skill_name = @skill)
		           and (@source = '' or source = @source) and (@before = '' or id < nullif(@before, '')::uuid)
		         order by id desc limit @limit) a `+joinDueRuns+`
		 order by id desc`,
		pgx.StrictNamedArgs{
			"enabled": f.Enabled, "skill": f.Skill, "source": f.Source, "before": f.Before,
			"limit": postgres.PageSize(f.Limit, defaultPage, maxPage), "max_due": MaxDue,
		})
}

// LongestDue returns the enabled automation whose oldest due run waits the longest, or [ErrNotFound] if none is due.
func LongestDue(ctx context.Context, db postgres.DB) (Listed, error) {
	return postgres.RowOr[Listed](ctx, db, ErrNotFound, "read the oldest due run", `
		select `+automationColumns+`, runs_due, oldest_due_at
		  from agent_automations a `+joinDueRuns+`
		 where enabled and runs_due > 0
		 order by oldest_due_at, id limit 1`, pgx.StrictNamedArgs{"max_due": MaxDue})
}

// Get returns one automation by name or id, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, nameOrID string) (Automation, error) {
	return postgres.RowOr[Automation](ctx, db, ErrNotFound, fmt.Sprintf("get automation %q", nameOrID), `
		select `+automationColumns+`
		  from agent_automations where name = @key or id::text = @key order by id::text = @key desc limit 1`,
		pgx.StrictNamedArgs{"key": nameOrID})
}

// Due returns the due automations, the longest waiting first: enabled ones, and those that can try their skill. It
// omits those whose time is before since. Claim each with its NextRunAt. limit is 100 when 0.
func Due(ctx context.Context, db postgres.DB, since time.Time, limit int) ([]Automation, error) {
	return postgres.Rows[Automation](ctx, db, "list due automations", `
		select `+automationColumns+`
		  from agent_automations a
		 where (enabled or `+trialPredicate+`) and trigger = 'cron' and next_run_at <= statement_timestamp()
		   and next_run_at >= @since
		 order by next_run_at, id limit @limit`,
		pgx.StrictNamedArgs{"since": since, "limit": postgres.PageSize(limit, defaultPage, maxPage)})
}

// Upcoming returns the next n times of an automation's schedule, from its next_run_at on, in its time zone. It
// returns none for a disabled automation, another trigger, or an invalid schedule. The first time may have passed: it
// is due. The others are in the future, because all missed times cause one run.
func (a Automation) Upcoming(n int) []time.Time {
	times := []time.Time{}
	if a.Trigger != Cron || !a.Enabled || a.NextRunAt == nil {
		return times
	}
	zone, err := schedule.Location(a.Timezone)
	if err != nil {
		return times
	}
	s, err := schedule.Parse(a.Cron, zone)
	if err != nil {
		return times
	}
	zone = s.Location() // the expression may name another one
	times = append(times, a.NextRunAt.In(zone))
	// Like a claim: the times between next_run_at and now are skipped.
	later, err := timing{Cron: a.Cron, Timezone: a.Timezone, NextRunAt: a.NextRunAt, Now: time.Now()}.next()
	if err != nil {
		return times
	}
	for next := later.In(zone); len(times) < n && !next.IsZero(); next = s.Next(next) {
		times = append(times, next)
	}
	return times
}
