// Package heartbeat is the surface of autonomous work. Every 30 minutes by default, it maintains the agent's health,
// objectives, automations and memory.
//
// One heartbeat is one execution under one hb_ trace. It holds the lane "heartbeat", so only one runs at a time. It
// has six phases, each a durable step with its own activity row:
//
//	self_heal       disable skills that keep failing
//	follow_through  run calls approved since the last heartbeat
//	advance_plan    work on due objectives
//	run_automations run scheduled automations, each claimed first
//	reflect         review the last 7 days, if a model called a tool or a call failed since the last review
//	save_memories   store the notes of all phases, drop expired memories
//
// A note carries the revision that its phase read. If the key has changed meanwhile, the note becomes a conflict for
// an admin, and nothing is overwritten.
//
// A heartbeat resumes after a crash in another process. If its lane is busy, or an admin is at work (lane "operate"),
// the heartbeat is recorded as skipped without an error. When an admin arrives, the heartbeat yields before its next
// step and resumes when the lane is free. After YieldLimit it skips its remaining phases. If another heartbeat acquired
// its lane meanwhile, it waits for that heartbeat. With nothing to do it calls no model.
//
// This describes the default agent. Another agent with heartbeat: in its document has its own heartbeat, in the lane
// "heartbeat:NAME" with its own schedule. That heartbeat works on the agent's objectives, runs the heartbeat's prompt,
// and saves memories. [Sync] makes the schedules match the agents.
package heartbeat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Flow is the registered name of the heartbeat.
const Flow = "heartbeat"

// Lane serialises heartbeats. OperateLane is the admin's; heartbeats yield to it.
const (
	Lane        = "heartbeat"
	OperateLane = "operate"
)

// Heartbeat is the surface. Pool, Loop and Logger are required.
type Heartbeat struct {
	Pool   *pgxpool.Pool
	Loop   *reason.Loop
	Heal   selfheal.Policy
	Logger *slog.Logger
	// YieldLimit bounds a wait for an admin. The default is 1 hour.
	YieldLimit time.Duration
}

// yieldError ends a heartbeat that waited for an admin longer than YieldLimit. It is not a *executions.StepError,
// because the step that waited has no result.
type yieldError struct{}

func (yieldError) Error() string      { return "an admin is still at work" }
func (yieldError) ErrorClass() string { return classYielded }

const classYielded = "yielded"

// isYield recognises a yieldError, also after a phase recorded it.
func isYield(err error) bool {
	var failure *executions.StepError
	return errors.As(err, &yieldError{}) || errors.As(err, &failure) && failure.Class == classYielded
}

// isStepError reports the recorded error of a step. Other errors end the run or yield.
func isStepError(err error) bool {
	var failure *executions.StepError
	return errors.As(err, &failure) && !isYield(err)
}

// Register registers the flow with the engine.
func (h *Heartbeat) Register(e *executions.Engine) error {
	h.YieldLimit = cmp.Or(h.YieldLimit, time.Hour)
	return e.Register(Flow, h.run)
}

// Spec describes an immediate heartbeat of the default agent.
func Spec(agent string) executions.Spec {
	return executions.Spec{Flow: Flow, Surface: trace.Heartbeat, Agent: agent}
}

// Summary is the result of a heartbeat's execution.
type Summary struct {
	Skipped string            `json:"skipped,omitempty"` // why nothing was done
	Phases  map[string]string `json:"phases"`            // a sentence about the result of each phase
}

type phase struct {
	name string
	run  func(b *heartbeatRun, ctx context.Context) (phaseResult, error)
}

// phaseResult is the recorded result of a phase. Later phases read only recorded results.
type phaseResult struct {
	Summary  string       `json:"summary"`
	Idle     bool         `json:"idle"` // there was nothing to do
	Report   string       `json:"report,omitempty"`
	Memories []memoryNote `json:"memories,omitempty"`
}

type heartbeatRun struct {
	*Heartbeat
	info      agentInfo
	agent     string // name of the agent; empty for the default agent
	isDefault bool   // the default agent also runs the phases that concern all agents
	report    string // report of self-heal, for the prompts
	summaries []string
	memories  []memoryNote
}

// run is the durable function.
func (h *Heartbeat) run(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
	var in input
	if err := json.Unmarshal(raw, &in); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	hold, skipped, err := h.acquireLane(ctx, laneName(in.Agent))
	switch {
	case err != nil:
		return executions.Result{}, err
	case skipped != "":
		return h.skip(ctx, skipped)
	}
	ctx = hold.Context()
	b, err := h.newRun(ctx, in)
	if err != nil {
		return executions.Result{}, err
	}
	summary := Summary{Phases: map[string]string{}}
	var failures []error
	for _, p := range b.phases() {
		result, err := h.runPhase(ctx, b, p)
		switch {
		case isYield(err):
			b.memories = append(b.memories, result.Memories...)
			return h.endEarly(ctx, b, p.name, summary)
		case err != nil && (executions.IsControl(err) || ctx.Err() != nil):
			return executions.Result{}, err
		case err != nil:
			failures = append(failures, fmt.Errorf("%s: %w", p.name, err))
			summary.Phases[p.name] = "failed: " + err.Error()
			b.memories = append(b.memories, result.Memories...)
			continue
		}
		summary.Phases[p.name] = result.Summary
		b.collect(result)
	}
	if err := b.reportToChannels(ctx, failures); err != nil {
		return executions.Result{}, err
	}
	return executions.Result{Summary: b.summary(), Value: summary}, errors.Join(failures...)
}

// reportToChannels sends the summaries and failures, if any, to the channels of the agent.
func (b *heartbeatRun) reportToChannels(ctx context.Context, failures []error) error {
	lines := slices.Clone(b.summaries)
	for _, err := range failures {
		lines = append(lines, "failed: "+err.Error())
	}
	if len(lines) == 0 {
		return nil
	}
	current, _ := executions.Current(ctx)
	agents := []string{b.agent, current.Agent}
	_, err := executions.StepTx(ctx, "report to channels", func(ctx context.Context, tx pgx.Tx) (int, error) {
		return channels.Report(ctx, tx, agents, "Heartbeat:\n\n- "+strings.Join(lines, "\n- "))
	})
	return err
}

// phases lists the phases in order. The default agent runs those that concern all agents.
func (b *heartbeatRun) phases() []phase {
	var list []phase
	if b.isDefault {
		list = append(list, phase{"self_heal", (*heartbeatRun).selfHeal},
			phase{"follow_through", (*heartbeatRun).followThrough})
	}
	list = append(list, phase{"advance_plan", (*heartbeatRun).advancePlan})
	if b.isDefault {
		list = append(list, phase{"run_automations", (*heartbeatRun).runAutomations})
	}
	if b.info.Prompt != "" {
		list = append(list, phase{"heartbeat_prompt", (*heartbeatRun).runPrompt})
	}
	if b.isDefault {
		list = append(list, phase{"reflect", (*heartbeatRun).reflect})
	}
	return append(list, phase{"save_memories", (*heartbeatRun).saveMemories})
}

// acquireLane acquires the heartbeat's lane, or returns why the heartbeat is skipped. A resumed heartbeat that lost its
// lane waits for it, because a skip would leave half of its work undone.
func (h *Heartbeat) acquireLane(ctx context.Context, lane string) (hold *executions.Hold, skipped string, err error) {
	busy := ""
	switch hold, err = executions.Lane(ctx, lane); {
	case errors.Is(err, lanes.ErrBusy):
		busy = err.Error()
	case err != nil:
		return nil, "", err
	}
	skipped, stepErr := h.blockedBy(ctx, busy)
	if stepErr != nil || skipped != "" {
		return nil, skipped, stepErr
	}
	for errors.Is(err, lanes.ErrBusy) {
		outcome, stepErr := executions.Wait(ctx, "lane", executions.LaneFree(lane, h.YieldLimit))
		switch {
		case stepErr != nil:
			return nil, "", stepErr
		case outcome.TimedOut:
			return nil, err.Error(), nil
		}
		hold, err = executions.Lane(ctx, lane)
	}
	return hold, "", err
}

// blockedBy decides once per heartbeat whether it starts. Another heartbeat or a working admin blocks the start.
func (h *Heartbeat) blockedBy(ctx context.Context, busy string) (string, error) {
	return executions.Step(ctx, "admin at work", func(ctx context.Context) (string, error) {
		if busy != "" {
			return busy, nil
		}
		held, err := executions.LaneHeld(ctx, OperateLane)
		if err != nil || !held {
			return "", err
		}
		return "an admin is at work (lane operate is held)", nil
	})
}

// skip records a skipped heartbeat.
func (h *Heartbeat) skip(ctx context.Context, why string) (executions.Result, error) {
	h.Logger.WarnContext(ctx, "heartbeat skipped", "reason", why)
	// A replay may find another holder of the lane, so it uses the recorded reason.
	why, err := executions.Phase(ctx, Flow, func(_ context.Context, effect *executions.Effect) (string, error) {
		effect.Status = activity.Skipped
		return why, nil
	})
	return executions.Result{Summary: "skipped: " + why, Value: Summary{Skipped: why}}, err
}

// runPhase runs one phase as a durable step. After an error or a yield it records the partial result, so that the notes
// of the phase are saved.
func (h *Heartbeat) runPhase(ctx context.Context, b *heartbeatRun, p phase) (phaseResult, error) {
	var partial phaseResult
	result, err := executions.Phase(ctx, p.name,
		func(ctx context.Context, effect *executions.Effect) (phaseResult, error) {
			result, err := p.run(b, h.yieldToAdmin(ctx))
			if (result.Idle && err == nil) || isYield(err) {
				effect.Status = activity.Skipped
			}
			effect.Output = map[string]any{"summary": result.Summary, "memories": len(result.Memories)}
			partial = result
			return result, err
		})
	if !isYield(err) && !isStepError(err) {
		return result, err
	}
	result, saveErr := executions.Step(ctx, p.name+" reached", func(context.Context) (phaseResult, error) {
		return partial, nil
	})
	if saveErr != nil {
		return phaseResult{}, saveErr
	}
	return result, err
}

// yieldToAdmin returns a context whose steps first yield to an admin. Phases themselves do not yield: a resumed
// heartbeat must reach the step before which it waited.
func (h *Heartbeat) yieldToAdmin(ctx context.Context) context.Context {
	return executions.Gate(ctx, h.yield)
}

// withoutYield returns a context that does not yield.
func withoutYield(ctx context.Context) context.Context { return executions.Gate(ctx, nil) }

// yield waits while an admin holds the lane operate. The engine calls it before each new step.
func (h *Heartbeat) yield(ctx context.Context) error {
	for {
		held, err := executions.LaneHeld(ctx, OperateLane)
		if err != nil || !held {
			return err
		}
		outcome, err := executions.Wait(ctx, "yield to operate", executions.LaneFree(OperateLane, h.YieldLimit))
		if err != nil {
			return err
		}
		if outcome.TimedOut {
			return yieldError{}
		}
	}
}

// endEarly ends a heartbeat that waited for an admin longer than YieldLimit. It still saves the notes, which needs no
// model and does not disturb the admin.
func (h *Heartbeat) endEarly(
	ctx context.Context, b *heartbeatRun, at string, summary Summary,
) (executions.Result, error) {
	ctx = withoutYield(ctx)
	started := false
	for _, p := range b.phases() {
		if started = started || p.name == at; !started {
			continue
		}
		summary.Phases[p.name] = "skipped: " + yieldError{}.Error()
		if p.name == at {
			continue // this phase already has a row
		}
		if p.name == "save_memories" && len(b.memories) > 0 {
			result, err := h.runPhase(ctx, b, phase{p.name, func(b *heartbeatRun, ctx context.Context) (phaseResult, error) {
				return b.saveMemories(withoutYield(ctx))
			}})
			if err != nil && !isStepError(err) {
				return executions.Result{}, err
			}
			summary.Phases[p.name] = result.Summary
			continue
		}
		_, err := executions.Phase(ctx, p.name, func(_ context.Context, effect *executions.Effect) (string, error) {
			effect.Status = activity.Skipped
			return yieldError{}.Error(), nil
		})
		if err != nil {
			return executions.Result{}, err
		}
	}
	return executions.Result{Summary: "cut short at " + at + ": " + yieldError{}.Error(), Value: summary}, nil
}

// collect adds a phase's result to the run, for later phases.
func (b *heartbeatRun) collect(result phaseResult) {
	if result.Report != "" {
		b.report = result.Report
	}
	if !result.Idle && result.Summary != "" {
		b.summaries = append(b.summaries, result.Summary)
	}
	b.memories = append(b.memories, result.Memories...)
}

// summary sums up the heartbeat.
func (b *heartbeatRun) summary() string {
	if len(b.summaries) == 0 {
		return "nothing to do"
	}
	return strings.Join(b.summaries, "; ")
}

// budgetScope names a phase's budget, which all its turns share.
func budgetScope(ctx context.Context, phase string) string {
	return "run:" + string(trace.IDFrom(ctx)) + ":" + phase
}

// selfHeal disables failing skills. One transaction disables them and writes their activities, so a crash cannot lose
// the evidence.
func (b *heartbeatRun) selfHeal(ctx context.Context) (phaseResult, error) {
	fresh := false
	report, err := executions.StepTx(ctx, "heal", func(ctx context.Context, tx pgx.Tx) (selfheal.Report, error) {
		fresh = true
		report, err := selfheal.Run(ctx, tx, b.Heal)
		if err != nil {
			return report, err
		}
		return report, recordHealed(ctx, tx, report)
	})
	if err != nil {
		return phaseResult{}, err
	}
	result := phaseResult{Report: report.Prompt(), Summary: fmt.Sprintf("%d skills checked", report.Checked)}
	if fresh {
		b.Logger.InfoContext(ctx, "healing report", "checked", report.Checked, "disabled", len(report.Healed),
			"report", result.Report)
	}
	if n := len(report.Healed); n > 0 {
		result.Summary = fmt.Sprintf("%d of %d skills taken out of service", n, report.Checked)
	}
	return result, nil
}

// recordHealed writes an activity for each disabled skill.
func recordHealed(ctx context.Context, tx pgx.Tx, report selfheal.Report) error {
	current, _ := executions.Current(ctx)
	for _, healed := range report.Healed {
		_, err := activity.Note(ctx, tx, activity.Entry{
			Skill: "heal_skill", Claim: current.Claim, Input: map[string]any{"skill": healed.Skill},
		}, activity.Outcome{Output: healed})
		if err != nil {
			return err
		}
	}
	return nil
}

// followThrough runs the calls approved since the last heartbeat.
func (b *heartbeatRun) followThrough(ctx context.Context) (phaseResult, error) {
	granted, err := executions.Step(ctx, "granted", func(ctx context.Context) ([]approvals.Approval, error) {
		return approvals.Approved(ctx, b.Pool, 20)
	})
	if err != nil {
		return phaseResult{}, err
	}
	if len(granted) == 0 {
		return phaseResult{Idle: true, Summary: "nothing was approved"}, nil
	}
	ran := 0
	for _, grant := range granted {
		err := b.runApproved(ctx, grant)
		if err != nil && !isStepError(err) {
			return phaseResult{}, err
		}
		if err == nil {
			ran++
		}
	}
	return phaseResult{Summary: fmt.Sprintf("%d of %d approved calls made", ran, len(granted))}, nil
}

// runApproved makes one approved call. The transaction that records the call's intent consumes the approval.
func (b *heartbeatRun) runApproved(ctx context.Context, grant approvals.Approval) error {
	skill, err := executions.Step(ctx, "skill of "+grant.ID, func(ctx context.Context) (skills.Skill, error) {
		skill, err := skills.Get(ctx, b.Pool, grant.SkillName)
		switch {
		case err != nil:
			return skill, err
		case skill.Revision != grant.SkillRevision:
			return skill, fmt.Errorf("skill %s has changed since it was approved", grant.SkillName)
		case !skill.Enabled:
			return skill, fmt.Errorf("skill %s %s", grant.SkillName, skill.OutOfService())
		}
		return skill, nil
	})
	if err != nil {
		return err
	}
	current, _ := executions.Current(ctx)
	step := "approved " + grant.ID
	_, err = b.Loop.Invoke(ctx, step, skill, grant.Arguments, executions.Call{
		Entry: activity.Entry{Purpose: "follow_through"}, OnIntent: approvals.Use(grant.ID, current.ID, step),
	})
	if approvals.IsUsed(err) {
		return &executions.StepError{Class: "refused", Message: "approval " + grant.ID +
			" was used elsewhere, or has expired"}
	}
	if err != nil && !isStepError(err) {
		return err
	}
	failure := ""
	if err != nil {
		failure = err.Error()
	}
	_, settleErr := executions.StepTx(ctx, "settle "+grant.ID, func(ctx context.Context, tx pgx.Tx) (struct{}, error) {
		return struct{}{}, automations.Settle(ctx, tx, grant.ID, failure)
	})
	return cmp.Or(settleErr, err)
}
