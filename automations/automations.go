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
// The agent may propose an automation ([Propose]). It is disabled until an admin accepts it; the database enforces
// that.
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

// maxUndecided bounds the number of undecided proposals.
const maxUndecided = 20

// States of a run.
const (
	DueNow  = "due"     // requested by an event, a signal or an admin; not claimed yet
	Claimed = "claimed" // running, or its process died
	Success = "success"
	Error   = "error" // retried at retry_at
	Dead    = "dead"  // its attempts are used up
	Skipped = "skipped"
)

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
	DecidedBy      string          `json:"decided_by"`  // the admin who accepted or rejected it
	Revision       int             `json:"revision"`    // grows with each change of its definition or decision
	NextRunAt      *time.Time      `json:"next_run_at"` // nil for events and signals
	LastRunAt      *time.Time      `json:"last_run_at"`
	LastTraceID    string          `json:"last_trace_id"`
	Source         string          `json:"source"`
	CreatedAt      time.Time       `json:"created_at"`
	UpdatedAt      time.Time       `json:"updated_at"`
}

// Run is a row of agent_automation_runs.
type Run struct {
	ID           string          `json:"id"`
	AutomationID string          `json:"automation_id"`
	Cause        string          `json:"cause"` // cron, event, signal, manual
	ScheduledFor time.Time       `json:"scheduled_for"`
	EventID      *string         `json:"event_id"`
	Status       string          `json:"status"`
	Attempt      int             `json:"attempt"`
	RetryAt      *time.Time      `json:"retry_at"`
	ExecutionID  *string         `json:"execution_id"`
	TraceID      string          `json:"trace_id"`
	ErrorMessage *string         `json:"error_message"`
	Output       json.RawMessage `json:"output"`
	CreatedAt    time.Time       `json:"created_at"`
	FinishedAt   *time.Time      `json:"finished_at"`
}

// AwaitedApproval returns the approval that the run's call waits for; empty for none.
func (r Run) AwaitedApproval() string {
	var output struct {
		ApprovalID string `json:"approval_id"`
	}
	if r.Status != Skipped || json.Unmarshal(r.Output, &output) != nil {
		return ""
	}
	return output.ApprovalID
}

// PausedFor lists the automations that are paused for a skill, by name. The database pauses them when the skill is
// disabled, and resumes them when it is enabled. A time that passed meanwhile is due once.
func PausedFor(ctx context.Context, db postgres.DB, skill string) ([]string, error) {
	return postgres.Names(ctx, db, "list automations paused for skill "+skill, `
		select name from agent_automations where skill_name = @skill and paused_for = @skill and not enabled`,
		pgx.StrictNamedArgs{"skill": skill})
}

// Enable enables an automation, for any disabled_by. It returns false if the automation is enabled already. It returns
// [ErrNotFound] for an unknown automation, [ErrProposal] for an undecided proposal, and [ErrSkillDisabled] while its
// skill is disabled.
func Enable(ctx context.Context, db postgres.DB, name string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automations a
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, paused_for = '',
		       updated_at = clock_timestamp()
		 where a.name = @name and not a.enabled and a.disabled_by <> 'proposal'
		   and not exists (select from agent_skills k where k.name = a.skill_name
		     and not k.enabled)`, pgx.StrictNamedArgs{"name": name})
	if err != nil {
		return false, fmt.Errorf("enable automation %q: %w", name, err)
	}
	a, err := Get(ctx, db, name)
	switch {
	case err != nil:
		return false, err
	case a.DisabledBy == Proposal:
		return false, fmt.Errorf("enable automation %q: %w", name, ErrProposal)
	case !a.Enabled:
		return false, fmt.Errorf("enable automation %q: enable skill %s first: %w", name, a.SkillName, ErrSkillDisabled)
	}
	return tag.RowsAffected() > 0, nil
}

// Disable disables an automation for an admin. The automation then does not resume with its skill. Disable also rejects
// a proposal. It returns false if an admin has disabled the automation already, and [ErrNotFound] for an unknown one.
func Disable(ctx context.Context, db postgres.DB, name, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" || by == SelfHeal || by == Proposal {
		return false, fmt.Errorf("disable automation %q: %w", name, errors.New("an admin is required"))
	}
	tag, err := db.Exec(ctx, `
		update agent_automations
		   set enabled = false, disabled_by = @by, disabled_reason = @reason, disabled_at = clock_timestamp(),
		       paused_for = '', decided_by = case when disabled_by = 'proposal' then @by else decided_by end,
		       updated_at = clock_timestamp()
		 where name = @name and (enabled or paused_for <> '' or disabled_by = 'proposal')`,
		pgx.StrictNamedArgs{"name": name, "by": truncate(by), "reason": truncate(reason)})
	if err != nil {
		return false, fmt.Errorf("disable automation %q: %w", name, err)
	}
	return changedOrFound(ctx, db, name, tag.RowsAffected())
}

// changedOrFound reports whether rows changed. Without a change, it returns [ErrNotFound] for an unknown automation.
func changedOrFound(ctx context.Context, db postgres.DB, name string, rows int64) (bool, error) {
	if rows > 0 {
		return true, nil
	}
	_, err := Get(ctx, db, name)
	return false, err
}

// Propose stores an automation that the agent by proposes, and returns it. The automation is disabled until an admin
// accepts it; earlier events and signals cause no runs. An identical proposal changes nothing. Propose returns
// [ErrNameTaken] for the name of another automation, and [ErrTooMany] while 20 proposals are undecided.
func Propose(ctx context.Context, db postgres.Beginner, d Definition, by, traceID string) (a Automation, err error) {
	r, err := resolve(d)
	if err != nil {
		return Automation{}, fmt.Errorf("propose automation %q: %w", d.Name, err)
	}
	if strings.TrimSpace(by) == "" || traceID == "" {
		return Automation{}, fmt.Errorf("propose automation %q: the proposer or its trace is missing", d.Name)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		inserted, err := insertProposal(ctx, tx, r, by, traceID)
		if err != nil {
			return err
		}
		if a, err = Get(ctx, tx, d.Name); err == nil && !inserted && !a.equals(r) {
			err = ErrNameTaken
		}
		return err
	})
	if err != nil {
		return Automation{}, fmt.Errorf("propose automation %q: %w", d.Name, err)
	}
	return a, nil
}

// insertProposal inserts the row; false if the name is taken. A lock makes the count of open proposals exact.
func insertProposal(ctx context.Context, tx pgx.Tx, r resolved, by, traceID string) (bool, error) {
	if _, err := tx.Exec(ctx,
		`select pg_advisory_xact_lock(hashtextextended('lanekeeper automation proposals', 0))`); err != nil {
		return false, err
	}
	var taken bool
	var open int
	err := tx.QueryRow(ctx, `
		select exists (select from agent_automations where name = @name),
		       (select count(*) from agent_automations where disabled_by = 'proposal')`,
		pgx.StrictNamedArgs{"name": r.Name}).Scan(&taken, &open)
	if err != nil || taken {
		return false, err
	}
	if open >= maxUndecided {
		return false, ErrTooMany
	}
	tag, err := tx.Exec(ctx, `
		insert into agent_automations
		       (name, description, trigger, cron, timezone, event, condition, signal, skill_name, arguments, prompt, flow,
		        max_attempts, enabled, disabled_by, disabled_reason, disabled_at, proposed_by, last_trace_id, source)
		values (@name, @description, @trigger, @cron, @timezone, @event, @condition, @signal, @skill, @arguments, @prompt,
		  @flow, @max_attempts, false, 'proposal', 'proposed by the agent; an admin accepts it', clock_timestamp(), @by,
		  @trace_id, @source)
		on conflict (name) do nothing`,
		pgx.StrictNamedArgs{
			"name": r.Name, "description": r.Description, "trigger": r.Trigger, "cron": r.Cron,
			"timezone": r.Timezone, "event": r.Event,
			"condition": r.When, "signal": r.Signal, "skill": r.Skill, "arguments": r.arguments, "prompt": r.Prompt,
			"flow": r.Flow, "max_attempts": r.MaxAttempts, "by": by, "trace_id": traceID, "source": SourceAgent,
		})
	return tag.RowsAffected() > 0, err
}

// equals reports whether a proposal of the agent equals r.
func (a Automation) equals(r resolved) bool {
	return a.ProposedBy != "" && a.Trigger == r.Trigger && a.Cron == r.Cron && a.Event == r.Event &&
		a.Condition == r.When &&
		a.Signal == r.Signal && a.SkillName == r.Skill && a.Prompt == r.Prompt && a.Flow == r.Flow
}

// Accept enables a proposal for an admin; a schedule starts now. It returns false if the automation is not a proposal,
// and [ErrNotFound] for an unknown automation. [Disable] rejects a proposal.
func Accept(ctx context.Context, db postgres.DB, nameOrID, by string) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("accept automation %q: an admin is required", nameOrID)
	}
	a, err := Get(ctx, db, nameOrID)
	if err != nil {
		return false, err
	}
	r, err := resolve(a.definition())
	if err != nil {
		return false, fmt.Errorf("accept automation %q: %w", nameOrID, err)
	}
	next, err := firstTime(ctx, db, r)
	if err != nil {
		return false, fmt.Errorf("accept automation %q: %w", nameOrID, err)
	}
	tag, err := db.Exec(ctx, `
		update agent_automations
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, decided_by = @by,
		       next_run_at = @next, updated_at = clock_timestamp()
		 where id = @id and disabled_by = 'proposal' and revision = @revision`,
		pgx.StrictNamedArgs{"id": a.ID, "by": truncate(by), "next": next, "revision": a.Revision})
	return postgres.Changed(tag, err, fmt.Sprintf("accept automation %q", nameOrID))
}

// definition returns the fields that determine an automation's times.
func (a Automation) definition() Definition {
	return Definition{
		Name: a.Name, Trigger: a.Trigger, Cron: a.Cron, Timezone: a.Timezone, Event: a.Event,
		When: a.Condition, Signal: a.Signal,
		Skill: a.SkillName, Prompt: a.Prompt, Flow: a.Flow, MaxAttempts: a.MaxAttempts,
	}
}

// AtRevision locks an automation until the transaction ends. It returns a [*postgres.StaleError] if the automation has
// another revision, and [ErrNotFound] if it is unknown. Revision 0 matches every revision.
func AtRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
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

// List returns automations, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Automation, error) {
	return postgres.Rows[Automation](ctx, db, "list automations", `
		select `+automationColumns+`
		  from agent_automations
		 where (@enabled::boolean is null or enabled = @enabled) and (@skill = '' or skill_name = @skill)
		   and (@source = '' or source = @source) and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		pgx.StrictNamedArgs{
			"enabled": f.Enabled, "skill": f.Skill, "source": f.Source, "before": f.Before,
			"limit": postgres.PageSize(f.Limit, defaultPage, maxPage),
		})
}

// Get returns one automation by name or id, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, nameOrID string) (Automation, error) {
	return postgres.RowOr[Automation](ctx, db, ErrNotFound, fmt.Sprintf("get automation %q", nameOrID), `
		select `+automationColumns+`
		  from agent_automations where name = @key or id::text = @key order by id::text = @key desc limit 1`,
		pgx.StrictNamedArgs{"key": nameOrID})
}

// trialPredicate matches an automation a that self-heal has paused for its own skill, and whose next time or pending
// run can be the skill's trial. Without it, a skill that no model uses would never return. It excludes skills that
// need approval, because the time of the call is unknown, and a second concurrent trial.
const trialPredicate = `(a.disabled_by = 'self_heal' and a.paused_for = a.skill_name and exists (
	select from agent_skills s where s.name = a.paused_for and not s.enabled and s.disabled_by = 'self_heal' and s.trial_at is not null
	   and s.trust <> 'approve' and coalesce((s.evidence #>> '{trial,until}')::timestamptz <= clock_timestamp(), true))
	and not exists (select from agent_automation_runs c join agent_automations o on o.id = c.automation_id
	                 where c.status = 'claimed' and o.paused_for = a.paused_for))`

// Due returns the due automations, the longest waiting first: enabled ones, and those that can try their skill. Claim
// each with its NextRunAt. limit is 100 when 0.
func Due(ctx context.Context, db postgres.DB, limit int) ([]Automation, error) {
	return postgres.Rows[Automation](ctx, db, "list due automations", `
		select `+automationColumns+`
		  from agent_automations a
		 where (enabled or `+trialPredicate+`) and trigger = 'cron' and next_run_at <= statement_timestamp()
		 order by next_run_at, id limit @limit`, pgx.StrictNamedArgs{"limit": postgres.PageSize(limit, defaultPage, maxPage)})
}

// RunFilter narrows [Runs]; the zero value lists the newest 100.
type RunFilter struct {
	AutomationID string
	Status       string // "dead" is the dead letter box
	Before       string // an id; returns only older rows
	Limit        int    // 100 when 0, at most 1000
}

const runColumns = `id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id,
	trace_id, error_message, output, created_at, finished_at`

// Runs returns runs, newest first.
func Runs(ctx context.Context, db postgres.DB, f RunFilter) ([]Run, error) {
	return postgres.Rows[Run](ctx, db, "list automation runs", `
		select `+runColumns+`
		  from agent_automation_runs
		 where (@automation = '' or automation_id = nullif(@automation, '')::uuid) and (@status = '' or status = @status)
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		pgx.StrictNamedArgs{
			"automation": f.AutomationID, "status": f.Status, "before": f.Before,
			"limit": postgres.PageSize(f.Limit, defaultPage, maxPage),
		})
}

// Abandoned returns claimed runs that no process will finish, oldest first. Their execution has ended or is missing, or
// they have none and were claimed over a day ago. Call [Finish] for each; one of several callers succeeds.
func Abandoned(ctx context.Context, db postgres.DB) ([]Run, error) {
	return postgres.Rows[Run](ctx, db, "list abandoned runs", `
		select r.id, r.automation_id, r.cause, r.scheduled_for, r.event_id, r.status, r.attempt, r.retry_at, r.execution_id,
		       r.trace_id, r.error_message, r.output, r.created_at, r.finished_at
		  from agent_automation_runs r
		 where r.status = 'claimed'
		   and case when r.execution_id is null then r.claimed_at < clock_timestamp() - interval '1 day'
		       else not exists (select from agent_executions e
		                         where e.id = r.execution_id and e.status in ('pending', 'running', 'waiting')) end
		 order by r.id limit @limit`, pgx.StrictNamedArgs{"limit": defaultPage})
}

// Upcoming returns the next n times of an automation's schedule, from its next_run_at on, in its time zone. It
// returns none for a disabled automation, another trigger, or an invalid schedule. The first may have passed: it is
// due. Other missed times are not run, so the second is to come.
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
	later, err := timing{Cron: a.Cron, Timezone: a.Timezone, NextRunAt: a.NextRunAt, Now: time.Now()}.next()
	if err != nil {
		return times
	}
	for next := later.In(zone); len(times) < n && !next.IsZero(); next = s.Next(next) {
		times = append(times, next)
	}
	return times
}
