// Package automations is what the agent does on its own: the tables agent_automations and
// agent_automation_runs.
//
// An automation calls a skill, or gives the model a goal, for one of three reasons:
//
//	cron    a time of a schedule has come. The run's unique key is the claim: of any number of processes that see
//	        it, one inserts the row ([Claim]), and the same transaction moves the automation to its next
//	        time. A time that came while nobody was there is run once, not once for each that was missed:
//	        the next time is the first after the database's now.
//	event   something was recorded in agent_events. A trigger makes a run due in the event's own transaction,
//	        whoever raised it; a condition over the event and the counters may let it pass unused.
//	signal  a condition over the counters has become true ([Watch]).
//
// Every run is claimed before anything runs ([Claim], [Take]), by a statement that one of many callers wins. A
// process that dies after that has left a row that says so. Package runner runs what is claimed.
//
// The agent may propose an automation ([Propose]). It is out of service until an admin accepts it, and the database
// keeps it so until the row says who decided.
//
// A run whose execution was cancelled, or failed for good, is claimed by nobody any more; [Abandoned] finds it, to be
// ended with [Finish] like any other that failed.
//
// A failed run is tried again, later each time, until the automation's attempts are used up; then it is dead, and
// stays there to be looked at ([Runs]) or tried again by hand ([Redrive]).
//
// The automations of a skill are paused when it is disabled, whoever does that, and exactly those ([PausedFor])
// resume when it is enabled: what an admin disabled, before or since, stays disabled. The database does it, so no
// writer has to.
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
	// ErrNotFound reports an automation that does not exist.
	ErrNotFound = errors.New("automation not found")
	// ErrRunNotFound reports a run that does not exist.
	ErrRunNotFound = errors.New("automation run not found")
	// ErrTaken reports a proposal whose name another automation has.
	ErrTaken = errors.New("an automation of this name exists and says something else")
	// ErrTooMany reports that the agent has proposed enough until somebody decides.
	ErrTooMany = errors.New("too many proposals are undecided")
	// ErrProposal reports a proposal that has to be accepted first.
	ErrProposal = errors.New("it is a proposal; accept it first")
	// ErrSkillDisabled reports an automation whose skill is out of service: nothing was changed.
	ErrSkillDisabled = errors.New("its skill is disabled")
)

// Triggers.
const (
	Cron   = "cron"
	Event  = "event"
	Signal = "signal"
)

// Manual is the cause of a run by an admin's hand; the others are the triggers.
const Manual = "manual"

// maxOpen is how many proposals may await a decision.
const maxOpen = 20

// States of a run.
const (
	DueNow  = "due"     // an event, a signal or an admin wants it; nobody has it yet
	Claimed = "claimed" // somebody runs it, or died doing so
	Success = "success"
	Error   = "error" // to be tried again at its retry_at
	Dead    = "dead"  // the attempts are used up
	Skipped = "skipped"
)

// SelfHeal is who disabled an automation that is paused for a skill which self-heal disabled.
const SelfHeal = "self_heal"

// Proposal is who disabled an automation that the agent proposed and nobody accepted.
const Proposal = "proposal"

// Sources of automations: a workspace file, the agent itself.
const (
	SourceWorkspace = "workspace"
	SourceAgent     = "agent"
)

// Automation is a row of agent_automations.
type Automation struct {
	ID             string          `json:"id"`
	Name           string          `json:"name"`
	Description    string          `json:"description"`
	Agent          string          `json:"agent"` // who acts in its runs; empty: the default agent
	Trigger        string          `json:"trigger"`
	Cron           string          `json:"cron"`
	Timezone       string          `json:"timezone"`
	Event          string          `json:"event"`
	Condition      string          `json:"condition"` // over the event and the counters; empty: always
	Signal         string          `json:"signal"`    // over the counters
	Armed          bool            `json:"armed"`     // the signal was false since it last fired
	SkillName      string          `json:"skill_name"`
	Arguments      json.RawMessage `json:"arguments"`
	Prompt         string          `json:"prompt"`
	Flow           string          `json:"flow"`
	MaxAttempts    int             `json:"max_attempts"`
	Enabled        bool            `json:"enabled"`
	DisabledReason string          `json:"disabled_reason"`
	DisabledBy     string          `json:"disabled_by"`
	DisabledAt     *time.Time      `json:"disabled_at"`
	PausedFor      string          `json:"paused_for"`  // the skill for which it is paused
	ProposedBy     string          `json:"proposed_by"` // the agent; empty for what people declared
	DecidedBy      string          `json:"decided_by"`  // who accepted or refused it
	Revision       int             `json:"revision"`    // grows when what it says, or what was decided, changes
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

// AwaitedApproval is the approval that the run's call waits for; empty when it waits for none.
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
// disabled, whoever disables it, and resumes exactly those when it is enabled: one whose time came meanwhile is due
// once.
func PausedFor(ctx context.Context, db postgres.DB, skill string) ([]string, error) {
	rows, err := db.Query(ctx, `
		select name from agent_automations where skill_name = @skill and paused_for = @skill and not enabled`,
		pgx.StrictNamedArgs{"skill": skill})
	return sortedNames(rows, err, "list automations paused for skill "+skill)
}

// Enable puts an automation into service, whoever took it out. False when it is in service already; [ErrNotFound]
// when there is none, [ErrProposal] when nobody has accepted it yet, [ErrSkillDisabled] while its skill is disabled.
// On error nothing is changed.
func Enable(ctx context.Context, db postgres.DB, name string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_automations a
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, paused_for = '', updated_at = clock_timestamp()
		 where a.name = @name and not a.enabled and a.disabled_by <> 'proposal'
		   and not exists (select from agent_skills k where k.name = a.skill_name and not k.enabled)`, pgx.StrictNamedArgs{"name": name})
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

// Disable takes an automation out of service, by an admin's word; it does not resume with its skill, also when it was
// paused for that. A proposal is refused that way. False when an admin has disabled it already; [ErrNotFound] when
// there is none.
func Disable(ctx context.Context, db postgres.DB, name, by, reason string) (bool, error) {
	if strings.TrimSpace(by) == "" || by == SelfHeal || by == Proposal {
		return false, fmt.Errorf("disable automation %q: %w", name, errors.New("name the admin who does it"))
	}
	tag, err := db.Exec(ctx, `
		update agent_automations
		   set enabled = false, disabled_by = @by, disabled_reason = @reason, disabled_at = clock_timestamp(), paused_for = '',
		       decided_by = case when disabled_by = 'proposal' then @by else decided_by end, updated_at = clock_timestamp()
		 where name = @name and (enabled or paused_for <> '' or disabled_by = 'proposal')`,
		pgx.StrictNamedArgs{"name": name, "by": clip(by), "reason": clip(reason)})
	if err != nil {
		return false, fmt.Errorf("disable automation %q: %w", name, err)
	}
	return settled(ctx, db, name, tag.RowsAffected())
}

func settled(ctx context.Context, db postgres.DB, name string, rows int64) (bool, error) {
	if rows > 0 {
		return true, nil
	}
	_, err := Get(ctx, db, name)
	return false, err
}

// Propose writes down an automation that the agent by wants, and returns it. It is out of service until an admin
// accepts it, and an event or signal in the meantime starts nothing. Proposing the same again changes nothing;
// [ErrTaken] when the name belongs to another automation, [ErrTooMany] when 20 proposals await a decision.
func Propose(ctx context.Context, db postgres.Beginner, d Definition, by, traceID string) (a Automation, err error) {
	r, err := resolve(d)
	if err != nil {
		return Automation{}, fmt.Errorf("propose automation %q: %w", d.Name, err)
	}
	if strings.TrimSpace(by) == "" || traceID == "" {
		return Automation{}, fmt.Errorf("propose automation %q: say who proposes it, under which trace", d.Name)
	}
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		inserted, err := insertProposal(ctx, tx, r, by, traceID)
		if err != nil {
			return err
		}
		if a, err = Get(ctx, tx, d.Name); err == nil && !inserted && !a.says(r) {
			err = ErrTaken
		}
		return err
	})
	if err != nil {
		return Automation{}, fmt.Errorf("propose automation %q: %w", d.Name, err)
	}
	return a, nil
}

// insertProposal writes the row; false when the name is taken. The lock makes the count of open ones exact.
func insertProposal(ctx context.Context, tx pgx.Tx, r resolved, by, traceID string) (bool, error) {
	if _, err := tx.Exec(ctx, `select pg_advisory_xact_lock(hashtextextended('lanekeeper automation proposals', 0))`); err != nil {
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
	if open >= maxOpen {
		return false, ErrTooMany
	}
	tag, err := tx.Exec(ctx, `
		insert into agent_automations
		       (name, description, trigger, cron, timezone, event, condition, signal, skill_name, arguments, prompt, flow, max_attempts,
		        enabled, disabled_by, disabled_reason, disabled_at, proposed_by, last_trace_id, source)
		values (@name, @description, @trigger, @cron, @timezone, @event, @condition, @signal, @skill, @arguments, @prompt, @flow, @max_attempts,
		        false, 'proposal', 'proposed by the agent; an admin accepts it', clock_timestamp(), @by, @trace_id, @source)
		on conflict (name) do nothing`,
		pgx.StrictNamedArgs{
			"name": r.Name, "description": r.Description, "trigger": r.Trigger, "cron": r.Cron, "timezone": r.Timezone, "event": r.Event,
			"condition": r.When, "signal": r.Signal, "skill": r.Skill, "arguments": r.arguments, "prompt": r.Prompt,
			"flow": r.Flow, "max_attempts": r.MaxAttempts, "by": by, "trace_id": traceID, "source": SourceAgent,
		})
	return tag.RowsAffected() > 0, err
}

// says reports whether a proposal of the agent was made in these words.
func (a Automation) says(r resolved) bool {
	return a.ProposedBy != "" && a.Trigger == r.Trigger && a.Cron == r.Cron && a.Event == r.Event && a.Condition == r.When &&
		a.Signal == r.Signal && a.SkillName == r.Skill && a.Prompt == r.Prompt && a.Flow == r.Flow
}

// Accept puts a proposal into service, by an admin's decision; a schedule begins now. False when it is not a
// proposal; [ErrNotFound] when there is no such automation. [Disable] refuses one.
func Accept(ctx context.Context, db postgres.DB, nameOrID, by string) (bool, error) {
	if strings.TrimSpace(by) == "" {
		return false, fmt.Errorf("accept automation %q: name the admin who does it", nameOrID)
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
		   set enabled = true, disabled_by = '', disabled_reason = '', disabled_at = null, decided_by = @by, next_run_at = @next,
		       updated_at = clock_timestamp()
		 where id = @id and disabled_by = 'proposal' and revision = @revision`,
		pgx.StrictNamedArgs{"id": a.ID, "by": clip(by), "next": next, "revision": a.Revision})
	if err != nil {
		return false, fmt.Errorf("accept automation %q: %w", nameOrID, err)
	}
	return tag.RowsAffected() > 0, nil
}

// definition is what decides about an automation's times.
func (a Automation) definition() Definition {
	return Definition{
		Name: a.Name, Trigger: a.Trigger, Cron: a.Cron, Timezone: a.Timezone, Event: a.Event, When: a.Condition, Signal: a.Signal,
		Skill: a.SkillName, Prompt: a.Prompt, Flow: a.Flow, MaxAttempts: a.MaxAttempts,
	}
}

// AtRevision locks an automation until the end of the transaction, so that what follows is based on what the caller
// has read. It is a [*postgres.StaleError] when the automation is at another revision, and [ErrNotFound] when there
// is none. 0 is whatever it is at.
func AtRevision(ctx context.Context, tx pgx.Tx, name string, revision int) error {
	if revision == 0 {
		return nil
	}
	var current int
	err := tx.QueryRow(ctx, `
		select revision from agent_automations where name = @name or id::text = @name
		 order by id::text = @name desc limit 1 for update`,
		postgres.Strict{"name": name}).Scan(&current)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return fmt.Errorf("look at automation %q: %w", name, err)
	}
	return postgres.AtRevision("automation", name, revision, current)
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
	Before  string // an id: only older rows
	Limit   int    // 100 when 0, at most 1000
}

// List returns automations, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Automation, error) {
	rows, err := db.Query(ctx, `
		select id, name, description, agent, trigger, cron, timezone, event, condition, signal, armed, skill_name, arguments,
		       prompt, flow, max_attempts, enabled, disabled_reason, disabled_by, disabled_at, paused_for, proposed_by, decided_by, revision, next_run_at, last_run_at, last_trace_id, source,
		       created_at, updated_at
		  from agent_automations
		 where (@enabled::boolean is null or enabled = @enabled) and (@skill = '' or skill_name = @skill)
		   and (@source = '' or source = @source) and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		pgx.StrictNamedArgs{
			"enabled": f.Enabled, "skill": f.Skill, "source": f.Source, "before": f.Before, "limit": page(f.Limit),
		})
	return collect(rows, err, "list automations")
}

// Get returns one automation by its name or id, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, nameOrID string) (Automation, error) {
	rows, err := db.Query(ctx, `
		select id, name, description, agent, trigger, cron, timezone, event, condition, signal, armed, skill_name, arguments,
		       prompt, flow, max_attempts, enabled, disabled_reason, disabled_by, disabled_at, paused_for, proposed_by, decided_by, revision, next_run_at, last_run_at, last_trace_id, source,
		       created_at, updated_at
		  from agent_automations where name = @key or id::text = @key order by id::text = @key desc limit 1`,
		pgx.StrictNamedArgs{"key": nameOrID})
	found, err := collect(rows, err, fmt.Sprintf("get automation %q", nameOrID))
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("get automation %q: %w", nameOrID, ErrNotFound)
	}
	if err != nil {
		return Automation{}, err
	}
	return found[0], nil
}

// tries holds for an automation a that self-heal has paused for its own skill, of which the one trial is to be made:
// its next time, or a run that waits, is the occasion. A skill that no model uses would else never come back. Not one
// that needs leave, of which nobody knows when it is made, nor while another of its automations makes the trial.
const tries = `(a.disabled_by = 'self_heal' and a.paused_for = a.skill_name and exists (
	select from agent_skills s where s.name = a.paused_for and not s.enabled and s.disabled_by = 'self_heal' and s.trial_at is not null
	   and s.trust <> 'approve' and coalesce((s.evidence #>> '{trial,until}')::timestamptz <= clock_timestamp(), true))
	and not exists (select from agent_automation_runs c join agent_automations o on o.id = c.automation_id
	                 where c.status = 'claimed' and o.paused_for = a.paused_for))`

// Due returns the automations whose time has come, the longest waiting first: those that are enabled, and those with
// which a skill is tried. Each is to be claimed with its NextRunAt. limit is 100 when 0.
func Due(ctx context.Context, db postgres.DB, limit int) ([]Automation, error) {
	rows, err := db.Query(ctx, `
		select id, name, description, agent, trigger, cron, timezone, event, condition, signal, armed, skill_name, arguments,
		       prompt, flow, max_attempts, enabled, disabled_reason, disabled_by, disabled_at, paused_for, proposed_by, decided_by, revision, next_run_at, last_run_at, last_trace_id, source,
		       created_at, updated_at
		  from agent_automations a
		 where (enabled or `+tries+`) and trigger = 'cron' and next_run_at <= statement_timestamp()
		 order by next_run_at, id limit @limit`, pgx.StrictNamedArgs{"limit": page(limit)})
	return collect(rows, err, "list due automations")
}

func collect(rows pgx.Rows, err error, what string) ([]Automation, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[Automation])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return found, nil
}

// RunFilter narrows [Runs]; the zero value lists the newest 100.
type RunFilter struct {
	AutomationID string
	Status       string // "dead" is the dead letter box
	Before       string // an id: only older rows
	Limit        int    // 100 when 0, at most 1000
}

// Runs returns runs, newest first.
func Runs(ctx context.Context, db postgres.DB, f RunFilter) ([]Run, error) {
	rows, err := db.Query(ctx, `
		select id, automation_id, cause, scheduled_for, event_id, status, attempt, retry_at, execution_id, trace_id, error_message, output,
		       created_at, finished_at
		  from agent_automation_runs
		 where (@automation = '' or automation_id = nullif(@automation, '')::uuid) and (@status = '' or status = @status)
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`,
		pgx.StrictNamedArgs{"automation": f.AutomationID, "status": f.Status, "before": f.Before, "limit": page(f.Limit)})
	return collectRuns(rows, err, "list automation runs")
}

// Abandoned returns the claimed runs that nobody will finish, oldest first: those whose execution has ended, or is
// no longer there, and those that belong to no execution and were claimed more than a day ago. Each is to be
// ended with [Finish], which one of many callers does. limit is 100 when 0.
func Abandoned(ctx context.Context, db postgres.DB, limit int) ([]Run, error) {
	rows, err := db.Query(ctx, `
		select r.id, r.automation_id, r.cause, r.scheduled_for, r.event_id, r.status, r.attempt, r.retry_at, r.execution_id, r.trace_id,
		       r.error_message, r.output, r.created_at, r.finished_at
		  from agent_automation_runs r
		 where r.status = 'claimed'
		   and case when r.execution_id is null then r.claimed_at < clock_timestamp() - interval '1 day'
		       else not exists (select from agent_executions e
		                         where e.id = r.execution_id and e.status in ('pending', 'running', 'waiting')) end
		 order by r.id limit @limit`, pgx.StrictNamedArgs{"limit": page(limit)})
	return collectRuns(rows, err, "list abandoned runs")
}

func collectRuns(rows pgx.Rows, err error, what string) ([]Run, error) {
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	runs, err := pgx.CollectRows(rows, pgx.RowToStructByName[Run])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	return runs, nil
}

func page(limit int) int {
	if limit <= 0 {
		return defaultPage
	}
	return min(limit, maxPage)
}

// Upcoming returns the next n times of an automation with a schedule, from its next_run_at on, in its time zone.
// None when it is disabled, has another trigger, or somebody broke its schedule. A time that has come
// already is the first; those that were missed besides it are not run.
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
	for next := a.NextRunAt.In(zone); len(times) < n && !next.IsZero(); next = s.Next(next) {
		times = append(times, next)
	}
	return times
}
