// Package heartbeat is the surface on which the agent acts by itself: every 30 minutes, unless told
// otherwise, it looks after its own health, its objectives, its automations and its memory.
//
// One heartbeat is one execution under one hb_ trace. It holds the lane "heartbeat", so two never run at
// once, and goes through six phases, each a durable step with an activity row of its own:
//
//	self_heal       skills that keep failing are taken out of service
//	follow_through  what an admin has approved since is done
//	advance_plan    objectives that are due are worked on
//	run_automations what is scheduled is run, each run claimed before it begins
//	reflect         the last 7 days of its own performance are looked at, if a model has called a tool or a call has
//	                failed since it last did
//	save_memories   what the phases want remembered is stored, what has expired is dropped
//
// What is to be remembered carries the revision that its phase had read. If somebody else has written the key by the
// time it is stored, it is kept as a conflict for an admin, and nothing is overwritten.
//
// A heartbeat that dies goes on where it stopped, in another process. One that finds its lane busy, or
// an admin at work (lane "operate"), is recorded as skipped and is no error; one that is under way when
// an admin comes yields before its next step and resumes when the admin is gone, or gives up its
// remaining phases after YieldLimit. When its lane has ended meanwhile and another heartbeat is in it, it
// goes on after that one. With nothing to do it calls no model.
//
// That is the heartbeat of the default agent. Another agent whose document has heartbeat: has one of its own, in the
// lane "heartbeat:NAME" and at its own times: it works on the objectives of that agent, follows the heartbeat's prompt,
// and saves memories. [Sync] makes the schedules match the agents.
package heartbeat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Flow is the name under which the heartbeat is registered with the engine.
const Flow = "heartbeat"

// Lane is the lane that makes heartbeats single; OperateLane is the admin's, to which they yield.
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
	// YieldLimit is how long a heartbeat under way waits for an admin to finish; default 1 hour.
	YieldLimit time.Duration
}

// yieldError ends a heartbeat that has waited long enough for an admin. It is no *executions.StepError,
// because it is no result of the step that it kept from being taken.
type yieldError struct{}

func (yieldError) Error() string      { return "an admin is still at work" }
func (yieldError) ErrorClass() string { return classYielded }

const classYielded = "yielded"

// yielded recognises a yieldError, also after a phase has recorded it.
func yielded(err error) bool {
	var failure *executions.StepError
	return errors.As(err, &yieldError{}) || errors.As(err, &failure) && failure.Class == classYielded
}

// isResult tells an error that a step recorded, and that others need not care for, from one that ends the
// run or gives way.
func isResult(err error) bool {
	var failure *executions.StepError
	return errors.As(err, &failure) && !yielded(err)
}

// Register tells the engine how to run heartbeats.
func (h *Heartbeat) Register(e *executions.Engine) error {
	if h.YieldLimit == 0 {
		h.YieldLimit = time.Hour
	}
	return e.Register(Flow, h.run)
}

// Schedule is when heartbeats of the default agent are due.
func Schedule(cron, timezone string) executions.Schedule {
	return executions.Schedule{Name: Flow, Flow: Flow, Surface: trace.Heartbeat, Cron: cron, Timezone: timezone}
}

// Spec describes one heartbeat of the default agent, now.
func Spec(agent string) executions.Spec {
	return executions.Spec{Flow: Flow, Surface: trace.Heartbeat, Agent: agent}
}

// Summary is what a heartbeat's execution ends with.
type Summary struct {
	Skipped string            `json:"skipped,omitempty"` // why nothing was done
	Phases  map[string]string `json:"phases"`            // what each did, in a sentence
}

// phase is one of the six.
type phase struct {
	name string
	run  func(b *beat, ctx context.Context) (done, error)
}

// done is what a phase has to say; it is recorded, so what a later phase needs of it must be in it.
type done struct {
	Summary  string   `json:"summary"`
	Idle     bool     `json:"idle"` // there was nothing to do
	Report   string   `json:"report,omitempty"`
	Memories []memory `json:"memories,omitempty"`
}

// beat is one heartbeat under way.
type beat struct {
	*Heartbeat
	who      who
	agent    string // whose heartbeat it is; empty: the default agent's
	shared   bool   // of the default agent, which looks after what concerns all
	report   string // of self-heal, for the prompts
	did      []string
	memories []memory
}

// run is the durable function.
func (h *Heartbeat) run(ctx context.Context, raw json.RawMessage) (executions.Result, error) {
	var in input
	if err := json.Unmarshal(raw, &in); err != nil {
		return executions.Result{}, fmt.Errorf("read input: %w", err)
	}
	hold, skipped, err := h.begin(ctx, in.lane())
	switch {
	case err != nil:
		return executions.Result{}, err
	case skipped != "":
		return h.skip(ctx, skipped)
	}
	ctx = hold.Context()
	b, err := h.beat(ctx, in)
	if err != nil {
		return executions.Result{}, err
	}
	summary := Summary{Phases: map[string]string{}}
	var failures []error
	for _, p := range b.phases() {
		said, err := h.phase(ctx, b, p)
		switch {
		case yielded(err):
			b.memories = append(b.memories, said.Memories...)
			return h.cutShort(ctx, b, p.name, summary)
		case err != nil && (executions.IsControl(err) || ctx.Err() != nil):
			return executions.Result{}, err
		case err != nil:
			failures = append(failures, fmt.Errorf("%s: %w", p.name, err))
			summary.Phases[p.name] = "failed: " + err.Error()
			b.memories = append(b.memories, said.Memories...)
			continue
		}
		summary.Phases[p.name] = said.Summary
		b.learn(said)
	}
	return executions.Result{Summary: b.sentence(), Value: summary}, errors.Join(failures...)
}

// phases lists what a heartbeat does, in order. What concerns all agents is the default agent's.
func (b *beat) phases() []phase {
	var list []phase
	if b.shared {
		list = append(list, phase{"self_heal", (*beat).selfHeal}, phase{"follow_through", (*beat).followThrough})
	}
	list = append(list, phase{"advance_plan", (*beat).advancePlan})
	if b.shared {
		list = append(list, phase{"run_automations", (*beat).runAutomations})
	}
	if b.who.Prompt != "" {
		list = append(list, phase{"heartbeat_prompt", (*beat).followPrompt})
	}
	if b.shared {
		list = append(list, phase{"reflect", (*beat).reflect})
	}
	return append(list, phase{"save_memories", (*beat).saveMemories})
}

// begin takes the heartbeat's lane, or says why this heartbeat does not take place. One that has begun before is not
// skipped for a lane that it lost while it waited or had no process: what it left half done would stay so.
func (h *Heartbeat) begin(ctx context.Context, lane string) (hold *executions.Hold, skipped string, err error) {
	busy := ""
	switch hold, err = executions.Lane(ctx, lane); {
	case errors.Is(err, lanes.ErrBusy):
		busy = err.Error()
	case err != nil:
		return nil, "", err
	}
	skipped, lost := h.inTheWay(ctx, busy)
	if lost != nil || skipped != "" {
		return nil, skipped, lost
	}
	for errors.Is(err, lanes.ErrBusy) {
		outcome, lost := executions.Wait(ctx, "lane", executions.LaneFree(lane, h.YieldLimit))
		switch {
		case lost != nil:
			return nil, "", lost
		case outcome.TimedOut:
			return nil, err.Error(), nil
		}
		hold, err = executions.Lane(ctx, lane)
	}
	return hold, "", err
}

// inTheWay decides, once per heartbeat, whether it begins at all: not beside another (busy), nor while an admin is at
// work.
func (h *Heartbeat) inTheWay(ctx context.Context, busy string) (string, error) {
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

// skip records a heartbeat that does not take place.
func (h *Heartbeat) skip(ctx context.Context, why string) (executions.Result, error) {
	h.Logger.WarnContext(ctx, "heartbeat skipped", "reason", why)
	// Another run of it may find another holder; it goes by the record.
	why, err := executions.Phase(ctx, Flow, func(_ context.Context, effect *executions.Effect) (string, error) {
		effect.Status = activity.Skipped
		return why, nil
	})
	return executions.Result{Summary: "skipped: " + why, Value: Summary{Skipped: why}}, err
}

// phase runs one phase as a durable step. Its error is recorded and does not keep the next from running;
// what it had done before is kept.
func (h *Heartbeat) phase(ctx context.Context, b *beat, p phase) (done, error) {
	var reached done
	said, err := executions.Phase(ctx, p.name, func(ctx context.Context, effect *executions.Effect) (done, error) {
		said, err := p.run(b, h.gated(ctx))
		if (said.Idle && err == nil) || yielded(err) {
			effect.Status = activity.Skipped
		}
		effect.Output = map[string]any{"summary": said.Summary, "memories": len(said.Memories)}
		reached = said
		return said, err
	})
	if yielded(err) {
		return h.noted(ctx, p, reached, err)
	}
	if !isResult(err) {
		return said, err
	}
	said, lost := executions.Step(ctx, p.name+" reached", func(context.Context) (done, error) {
		return reached, nil
	})
	if lost != nil {
		return done{}, lost
	}
	return said, err
}

// noted keeps what a phase had noted when it gave way for good, so that it is saved before the heartbeat ends.
func (h *Heartbeat) noted(ctx context.Context, p phase, reached done, why error) (done, error) {
	said, lost := executions.Step(ctx, p.name+" reached", func(context.Context) (done, error) { return reached, nil })
	if lost != nil {
		return done{}, lost
	}
	return said, why
}

// gated is a context in which an admin goes first. Only steps that do something are taken in one, not those
// that group others: when a heartbeat resumes, it must come back to the very step before which it waited.
func (h *Heartbeat) gated(ctx context.Context) context.Context { return executions.Gate(ctx, h.yield) }

// ungated is a context in which nobody is waited for.
func ungated(ctx context.Context) context.Context { return executions.Gate(ctx, nil) }

// yield lets an admin go first: it is asked before every step that is new.
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

// cutShort ends a heartbeat that gave way to an admin for good. What was noted is saved all the same: it takes no model
// and is nothing that an admin waits for.
func (h *Heartbeat) cutShort(ctx context.Context, b *beat, at string, summary Summary) (executions.Result, error) {
	ctx = ungated(ctx)
	reached := false
	for _, p := range b.phases() {
		if reached = reached || p.name == at; !reached {
			continue
		}
		summary.Phases[p.name] = "skipped: " + yieldError{}.Error()
		if p.name == at {
			continue // it has a row already
		}
		if p.name == "save_memories" && len(b.memories) > 0 {
			said, err := h.phase(ctx, b, phase{p.name, func(b *beat, ctx context.Context) (done, error) { return b.saveMemories(ungated(ctx)) }})
			if err != nil && !isResult(err) {
				return executions.Result{}, err
			}
			summary.Phases[p.name] = said.Summary
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

// learn keeps what later phases need of a phase.
func (b *beat) learn(said done) {
	if said.Report != "" {
		b.report = said.Report
	}
	if !said.Idle && said.Summary != "" {
		b.did = append(b.did, said.Summary)
	}
	b.memories = append(b.memories, said.Memories...)
}

// sentence sums a heartbeat up.
func (b *beat) sentence() string {
	if len(b.did) == 0 {
		return "nothing to do"
	}
	return strings.Join(b.did, "; ")
}

// scope is the name under which a phase reserves tokens and money: each has its own budget, which all turns in it
// share.
func scope(ctx context.Context, phase string) string {
	return "run:" + string(trace.IDFrom(ctx)) + ":" + phase
}

// selfHeal takes failing skills out of service. What it finds, and the row of each healed skill, are one
// transaction, so that a crash cannot lose the evidence.
func (b *beat) selfHeal(ctx context.Context) (done, error) {
	fresh := false
	report, err := executions.StepTx(ctx, "heal", func(ctx context.Context, tx pgx.Tx) (selfheal.Report, error) {
		fresh = true
		report, err := selfheal.Run(ctx, tx, b.Heal)
		if err != nil {
			return report, err
		}
		return report, noteHealed(ctx, tx, report)
	})
	if err != nil {
		return done{}, err
	}
	said := done{Report: report.Prompt(), Summary: fmt.Sprintf("%d skills checked", report.Checked)}
	if fresh {
		b.Logger.InfoContext(ctx, "healing report", "checked", report.Checked, "disabled", len(report.Healed), "report", said.Report)
	}
	if n := len(report.Healed); n > 0 {
		said.Summary = fmt.Sprintf("%d of %d skills taken out of service", n, report.Checked)
	}
	return said, nil
}

// noteHealed leaves a row for each skill that was disabled.
func noteHealed(ctx context.Context, tx pgx.Tx, report selfheal.Report) error {
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

// followThrough does what was approved since the last heartbeat.
func (b *beat) followThrough(ctx context.Context) (done, error) {
	granted, err := executions.Step(ctx, "granted", func(ctx context.Context) ([]approvals.Approval, error) {
		return approvals.Approved(ctx, b.Pool, 20)
	})
	if err != nil {
		return done{}, err
	}
	if len(granted) == 0 {
		return done{Idle: true, Summary: "nothing was approved"}, nil
	}
	ran := 0
	for _, grant := range granted {
		err := b.useGrant(ctx, grant)
		if err != nil && !isResult(err) {
			return done{}, err
		}
		if err == nil {
			ran++
		}
	}
	return done{Summary: fmt.Sprintf("%d of %d approved calls made", ran, len(granted))}, nil
}

// useGrant makes one approved call. The grant is consumed with the call's intent.
func (b *beat) useGrant(ctx context.Context, grant approvals.Approval) error {
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
		return &executions.StepError{Class: "refused", Message: "approval " + grant.ID + " was used by somebody else, or has expired"}
	}
	if err != nil && !isResult(err) {
		return err
	}
	failure := ""
	if err != nil {
		failure = err.Error()
	}
	_, unsettled := executions.StepTx(ctx, "settle "+grant.ID, func(ctx context.Context, tx pgx.Tx) (struct{}, error) {
		return struct{}{}, automations.Settle(ctx, tx, grant.ID, failure)
	})
	return cmp.Or(unsettled, err)
}
