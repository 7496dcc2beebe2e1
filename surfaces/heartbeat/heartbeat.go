// Package heartbeat is the surface of autonomous work. Every 30 minutes by default, it maintains the agent's health,
// objectives, automations and memory.
//
// One heartbeat is one execution under one hb_ trace. It holds the lane "heartbeat", so only one runs at a time. It
// has six phases, each a durable step with its own activity row:
//
//	self_heal       disable skills that keep failing
//	follow_through  run approved calls, at most 20
//	advance_plan    work on due objectives
//	run_automations run scheduled automations, each claimed first
//	reflect         review the last 7 days, if a model called a tool or a call failed since the last review
//	save_memories   store the notes of all phases, drop expired memories
//
// A note carries the revision that its phase read. If the key has changed meanwhile, the note becomes a conflict for
// an admin. A note about a key that its phase has not read replaces the note of an earlier heartbeat of the agent, and
// no other entry.
//
// A heartbeat resumes after a crash in another process. If its lane is busy, or an admin is at work (lane "operate"),
// the heartbeat is recorded as skipped without an error. When an admin arrives, the heartbeat yields before its next
// step and resumes when the lane is free. After YieldLimit it only saves its notes and skips the other phases. The
// phase save_memories does not yield. If another heartbeat acquired its lane meanwhile, it waits for that heartbeat.
// With nothing to do it calls no model.
//
// A prompt in the agent's document is a further phase, heartbeat_prompt, before reflect.
//
// This describes the default agent. Another agent with heartbeat: in its document has its own heartbeat, in the lane
// "heartbeat:NAME" with its own schedule. That heartbeat runs the agent's approved calls, works on its objectives,
// runs the heartbeat's prompt, and saves memories. [Sync] makes the schedules match the agents.
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
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
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
	return executions.Result{Summary: b.summary(), Value: summary}, joinErrors(failures)
}

// joinErrors joins errors to one line, in their order; nil without any.
func joinErrors(errs []error) (joined error) {
	for _, err := range errs {
		switch {
		case joined == nil:
			joined = err
		case err != nil:
			joined = fmt.Errorf("%w; %w", joined, err)
		}
	}
	return joined
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
		list = append(list, phase{"self_heal", (*heartbeatRun).selfHeal})
	}
	list = append(list, phase{"follow_through", (*heartbeatRun).followThrough},
		phase{"advance_plan", (*heartbeatRun).advancePlan})
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

// budgetScope names a phase's budget.
func budgetScope(ctx context.Context, phase string) string {
	return "run:" + string(trace.IDFrom(ctx)) + ":" + phase
}
