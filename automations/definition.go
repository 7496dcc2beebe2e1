package automations

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

const (
	maxName         = 255
	maxText         = 8192
	defaultAttempts = 3
	defaultZone     = "UTC" // a time zone
	maxAttempts     = 20
)

var skillName = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)

// Definition declares an automation in a workspace file. It has a skill with arguments, a flow, or a prompt; and a
// cron expression, an event, or a signal. Conditions are expressions (expr-lang.org) over [ConditionEnv] and
// [Counters]. Validation reports unknown names and type mismatches.
type Definition struct {
	Name        string `yaml:"name" json:"name"`
	Description string `yaml:"description" json:"description,omitempty"`
	// Agent is the agent of the runs. Empty means the default agent.
	Agent string `yaml:"agent" json:"agent,omitempty"`
	// Trigger is cron, event or signal. If it is empty, the other fields decide.
	Trigger string `yaml:"trigger" json:"trigger,omitempty"`
	// Cron has five fields, or is a name such as @daily or @every 30m.
	Cron string `yaml:"cron" json:"cron,omitempty"`
	// Timezone is that of Cron. Empty means UTC. Other triggers have none.
	Timezone string `yaml:"timezone" json:"timezone,omitempty"`
	// Event is the name of an event.
	Event string `yaml:"event" json:"event,omitempty"`
	// When is a condition on the event, such as payload.action == "opened". Empty means each event of the name.
	When string `yaml:"when" json:"when,omitempty"`
	// Signal is a condition, such as pending_approvals > 3.
	Signal string `yaml:"signal" json:"signal,omitempty"`
	// Skill is the name of a skill, which a run calls.
	Skill string `yaml:"skill" json:"skill,omitempty"`
	// Arguments are those of the skill, or the flow's input beside the cause of the run.
	Arguments map[string]any `yaml:"arguments" json:"arguments,omitempty"`
	// Flow is the name of a flow. A run starts it and does not wait for it.
	Flow string `yaml:"flow" json:"flow,omitempty"`
	// Prompt is a goal for the model.
	Prompt string `yaml:"prompt" json:"prompt,omitempty"`
	// MaxAttempts is at most 20. 0 means 3.
	MaxAttempts int `yaml:"max_attempts" json:"max_attempts,omitempty"`
}

// Validate returns the problems of d, each as "field path: problem", joined as by [errors.Join].
func Validate(d Definition) error {
	_, err := resolve(d)
	return err
}

// resolved is a definition in its stored form.
type resolved struct {
	Definition
	arguments json.RawMessage
	schedule  schedule.Schedule // of cron
}

// resolve trims the texts of a definition, fills in its defaults and checks it.
func resolve(d Definition) (resolved, error) {
	r := resolved{Definition: d}
	r.When, r.Signal, r.Prompt = strings.TrimSpace(r.When), strings.TrimSpace(r.Signal), strings.TrimSpace(r.Prompt)
	if r.Trigger == "" {
		r.Trigger = Cron
		if d.Event != "" {
			r.Trigger = Event
		} else if d.Signal != "" {
			r.Trigger = Signal
		}
	}
	r.Timezone = cmp.Or(r.Timezone, defaultZone)
	r.MaxAttempts = cmp.Or(r.MaxAttempts, defaultAttempts)
	problems := r.checkTexts()
	problems = append(problems, r.checkTrigger()...)
	problems = append(problems, r.checkAction()...)
	if r.MaxAttempts < 1 || r.MaxAttempts > maxAttempts {
		problems.Add("max_attempts", "must be between 1 and %d", maxAttempts)
	}
	return r, errors.Join(problems...)
}

func (r *resolved) checkTexts() fielderr.List {
	var problems fielderr.List
	if strings.TrimSpace(r.Name) == "" {
		problems.Add("name", "is empty")
	}
	for _, text := range []struct {
		field, value string
		most         int
	}{
		{"name", r.Name, maxName},
		{"description", r.Description, maxText},
		{"agent", r.Agent, maxName},
		{"prompt", r.Prompt, maxText},
		{"event", r.Event, maxName},
	} {
		if len(text.value) > text.most || strings.ContainsRune(text.value, 0) {
			problems.Add(text.field, "must have at most %d bytes and no NUL character", text.most)
		}
	}
	return problems
}

// checkTrigger checks that the fields fit the trigger, and parses the schedule.
func (r *resolved) checkTrigger() fielderr.List {
	var problems fielderr.List
	for _, field := range []struct{ name, value, trigger string }{
		{"cron", r.Cron, Cron}, {"event", r.Event, Event}, {"when", r.When, Event}, {"signal", r.Signal, Signal},
	} {
		if field.value != "" && r.Trigger != field.trigger && slices.Contains([]string{Cron, Event, Signal}, r.Trigger) {
			problems.Add(field.name, "an automation with trigger %s has none", r.Trigger)
		}
	}
	if r.Timezone != defaultZone && slices.Contains([]string{Event, Signal}, r.Trigger) {
		problems.Add("timezone", "an automation with trigger %s has none; only a cron has one", r.Trigger)
	}
	switch r.Trigger {
	case Cron:
		problems = append(problems, r.checkSchedule()...)
	case Event:
		if strings.TrimSpace(r.Event) == "" {
			problems.Add("event", "name the event it waits for")
		}
		if r.When != "" {
			problems = append(problems, checkCondition("when", r.When, ConditionEnv{})...)
		}
	case Signal:
		if r.Signal == "" {
			problems.Add("signal", "write the condition it waits for, such as pending_approvals > 3")
		} else {
			problems = append(problems, checkCondition("signal", r.Signal, Counters{})...)
		}
	default:
		problems.Add("trigger", "%q is not one of cron, event, signal", r.Trigger)
	}
	return problems
}

func (r *resolved) checkSchedule() (problems fielderr.List) {
	zone, err := schedule.Location(r.Timezone)
	if err != nil {
		problems.Add("timezone", "%w", err)
	}
	if strings.TrimSpace(r.Cron) == "" {
		problems.Add("cron", "say when it runs: a cron such as \"*/30 * * * *\", an event, or a signal")
	} else if r.schedule, err = schedule.Parse(r.Cron, zone); err != nil {
		problems.Add("cron", "%w", err)
	} else if own := r.schedule.Location(); zone != nil && r.Timezone != defaultZone && own.String() != zone.String() {
		problems.Add("cron", "runs in %s, and timezone names %s; keep one of them", own, zone)
	}
	return problems
}

func checkCondition(field, text string, env any) (problems fielderr.List) {
	if _, err := compile(text, env); err != nil {
		problems.Add(field, "%w", err)
	}
	return problems
}

// checkAction checks that the automation has exactly one of a skill, a flow and a prompt, and encodes its arguments.
func (r *resolved) checkAction() fielderr.List {
	var problems fielderr.List
	switch {
	case r.Skill == "" && r.Prompt == "" && r.Flow == "":
		problems.Add("skill", "name a skill or a flow, or write a prompt")
	case r.Flow != "" && (r.Skill != "" || r.Prompt != ""):
		problems.Add("flow", "there is a skill or a prompt too; keep one")
	case r.Flow != "" && executions.CheckName(r.Flow) != nil:
		problems.Add("flow", "%w", executions.CheckName(r.Flow))
	case r.Skill != "" && r.Prompt != "":
		problems.Add("prompt", "there is a skill too; keep one")
	case r.Skill != "" && !skillName.MatchString(r.Skill):
		problems.Add("skill", "%q must be 1 to 64 of the characters a-z A-Z 0-9 _ -", r.Skill)
	case r.Prompt != "" && len(r.Arguments) > 0:
		problems.Add("arguments", "only a skill and a flow have them")
	}
	r.arguments = json.RawMessage(`{}`)
	if len(r.Arguments) > 0 {
		raw, err := json.Marshal(r.Arguments)
		if err == nil && strings.Contains(strings.ReplaceAll(string(raw), `\\`, ""), `\u0000`) {
			err = errors.New("has a NUL character")
		}
		if err != nil {
			problems.Add("arguments", "%w", err)
		}
		r.arguments = raw
	}
	return problems
}

// Put stores the declaration d and reports whether it changed anything. A changed schedule is due at its first time
// from now. The state (enabled, paused, last run) stays, except that an undecided proposal of the name is accepted.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	r, err := resolve(d)
	if err != nil {
		return false, fmt.Errorf("put automation %q: %w", d.Name, err)
	}
	next, err := firstTime(ctx, db, r)
	if err != nil {
		return false, fmt.Errorf("put automation %q: %w", d.Name, err)
	}
	tag, err := db.Exec(ctx, `
		insert into agent_automations as a
		       (name, description, agent, trigger, cron, timezone, event, condition, signal, skill_name, arguments, prompt,
		        flow, max_attempts, next_run_at, source)
		values (@name, @description, @agent, @trigger, @cron, @timezone, @event, @condition, @signal, @skill, @arguments, @prompt,
		        @flow, @max_attempts, @next, @source)
		on conflict (name) do update
		   set description = excluded.description, agent = excluded.agent, trigger = excluded.trigger,
		       cron = excluded.cron, timezone = excluded.timezone, event = excluded.event,
		       condition = excluded.condition, signal = excluded.signal, skill_name = excluded.skill_name,
		       arguments = excluded.arguments, prompt = excluded.prompt, flow = excluded.flow,
		       max_attempts = excluded.max_attempts, source = excluded.source, updated_at = clock_timestamp(),
		       signal_armed = a.signal_armed or a.signal <> excluded.signal,
		       enabled = a.enabled or a.disabled_by = 'proposal',
		       disabled_reason = case when a.disabled_by = 'proposal' then '' else a.disabled_reason end,
		       disabled_at = case when a.disabled_by = 'proposal' then null else a.disabled_at end,
		       disabled_by = case when a.disabled_by = 'proposal' then '' else a.disabled_by end,
		       decided_by = case when a.disabled_by = 'proposal' then excluded.source else a.decided_by end,
		       next_run_at = case when (a.trigger, a.cron, a.timezone) = (excluded.trigger, excluded.cron, excluded.timezone)
		                               and a.disabled_by <> 'proposal'
		                          then a.next_run_at else excluded.next_run_at end
		 where (a.description, a.agent, a.trigger, a.cron, a.timezone, a.event, a.condition, a.signal,
		        a.skill_name, a.arguments, a.prompt, a.flow, a.max_attempts, a.source)
		       is distinct from
		       (excluded.description, excluded.agent, excluded.trigger, excluded.cron, excluded.timezone, excluded.event,
		        excluded.condition, excluded.signal, excluded.skill_name, excluded.arguments, excluded.prompt, excluded.flow,
		        excluded.max_attempts, excluded.source)`,
		pgx.StrictNamedArgs{
			"name": r.Name, "description": r.Description, "agent": r.Agent, "trigger": r.Trigger, "cron": r.Cron,
			"timezone": r.Timezone, "event": r.Event, "condition": r.When, "signal": r.Signal, "skill": r.Skill,
			"arguments": r.arguments, "prompt": r.Prompt, "flow": r.Flow, "max_attempts": r.MaxAttempts,
			"next": next, "source": postgres.SourceWorkspace,
		})
	return postgres.Changed(tag, err, fmt.Sprintf("put automation %q", d.Name))
}

func firstTime(ctx context.Context, db postgres.DB, r resolved) (*time.Time, error) {
	if r.Trigger != Cron {
		return nil, nil
	}
	var now time.Time
	if err := db.QueryRow(ctx, `select clock_timestamp()`).Scan(&now); err != nil {
		return nil, err
	}
	next := r.schedule.Next(now)
	return &next, nil
}

// Remove deletes the workspace's automations except keep, with their runs, and returns their names.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.DeleteOthers(ctx, db, "automations", "agent_automations", keep)
}
