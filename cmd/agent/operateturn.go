package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// operator is what `agent operate` works with: a session of an admin, and the process that takes its turns.
type operator struct {
	*cli
	s     *session
	app   *app
	admin *operate.Session
	last  string            // the trace of the latest turn
	left  map[string]string // approvals that were left open, and the turns that wait for them
	// ask puts a question to the admin. heard is false when there is no answer, because nobody is there any more or
	// because it was decided elsewhere. nil: there is nobody to ask.
	ask func(ctx context.Context, question string) (answer string, heard bool)
	// arrived, where set, hears of every event before it is shown.
	arrived func()
}

// turn is Session.Turn or Session.Resume.
type turn func(ctx context.Context, emit func(operate.Event)) (operate.Done, error)

// message is a turn with one.
func (o *operator) message(text string) turn {
	return func(ctx context.Context, emit func(operate.Event)) (operate.Done, error) {
		return o.admin.Turn(ctx, text, false, emit)
	}
}

// take takes a turn and shows it. When ctx ends, the turn is cancelled and take waits for that.
func (o *operator) take(ctx context.Context, t turn, show func(operate.Event)) (operate.Done, error) {
	working, leave := context.WithCancelCause(context.WithoutCancel(ctx))
	defer leave(nil)
	defer context.AfterFunc(ctx, func() { leave(operate.ErrInterrupt) })()
	var done operate.Done
	var err error
	events := make(chan operate.Event, 256)
	go func() { // ends before take does
		defer close(events)
		done, err = t(working, func(e operate.Event) {
			if o.arrived != nil {
				o.arrived()
			}
			events <- e
		})
	}()
	execution := ""
	for e := range events {
		show(e)
		switch data := e.Data.(type) {
		case operate.Start:
			o.last, execution = data.TraceID, data.ExecutionID
		case operate.Approval:
			if !o.decide(working, data) {
				o.left[data.ID] = execution
				leave(operate.ErrLeave)
			}
		}
	}
	return done, err
}

// decide asks the admin about a call. False leaves it open.
func (o *operator) decide(ctx context.Context, a operate.Approval) bool {
	if o.ask == nil {
		return false
	}
	answer, heard := o.ask(ctx, "approve? [y/N/reason, nothing leaves it open] ")
	answer = strings.TrimSpace(answer)
	switch {
	case !heard:
		return true // not ours to decide any more
	case answer == "":
		return false
	}
	yes := strings.EqualFold(answer, "y") || strings.EqualFold(answer, "yes")
	if strings.EqualFold(answer, "n") || strings.EqualFold(answer, "no") || yes {
		answer = ""
	}
	if err := o.record(ctx, a.ID, yes, answer); err != nil {
		o.say("agent: %s", printable(err.Error()))
	}
	return true
}

// record decides an approval.
func (o *operator) record(ctx context.Context, id string, approve bool, reason string) error {
	_, err := approvals.Decide(ctx, o.s.pool, id, approve, "admin", reason)
	o.admin.Look()
	return err
}

// failure is the error with which a turn ends the command; nil for one that was answered.
func (o *operator) failure(ctx context.Context, done operate.Done, err error) error {
	switch {
	case ctx.Err() != nil:
		return &exitError{exitInterrupted, nil}
	case err != nil:
		return &traced{err, o.last}
	case done.Ended == operate.WaitingApproval:
		return &traced{hint(errors.New("the turn waits for approval"),
			"decide with agent approvals; it goes on in a process that runs `agent serve`"), o.last}
	case done.Ended != reason.Answered && done.Ended != operate.HandedOn:
		return &traced{errors.New("the turn has no answer: " + unanswered(done.Ended)), o.last}
	}
	return nil
}

// unanswered says how a turn ended that was not answered.
func unanswered(ended string) string {
	if ended == reason.Stalled {
		return "the model stalled"
	}
	said := "its limit of " + ended + " was reached"
	if setting := limitSettings[ended]; setting != "" {
		said += "; see " + setting
	}
	return said
}

// limitSettings are the settings of a turn's limits.
var limitSettings = map[string]string{
	"day": "AGENT_BUDGET_DAY_TOKENS and AGENT_BUDGET_DAY_USD", "surface": "AGENT_BUDGET_OPERATE_TOKENS and AGENT_BUDGET_OPERATE_USD",
	"tokens": "AGENT_MAX_TOKENS", "money": "AGENT_MAX_COST_USD", "iterations": "AGENT_MAX_ITERATIONS", "time": "AGENT_RUN_TIMEOUT",
}

// once takes one turn.
func (o *operator) once(ctx context.Context, text string) error {
	if terminal(o.in) && terminal(o.err) {
		o.ask = o.askOnce
	}
	if o.json {
		return o.onceJSON(ctx, text)
	}
	show := o.shower()
	done, err := o.take(ctx, o.message(text), show.event)
	show.end()
	return errors.Join(o.failure(ctx, done, err), show.failed)
}

// onceJSON prints one document.
func (o *operator) onceJSON(ctx context.Context, text string) error {
	answer := operate.Answer{Tools: []operate.ToolCall{}, Approvals: []operate.Approval{}}
	o.ask = nil
	done, err := o.take(ctx, o.message(text), answer.Add)
	if err != nil {
		return o.failure(ctx, done, err)
	}
	answer.Done = done
	return errors.Join(o.print(answer, nil), o.failure(ctx, done, nil))
}

// askOnce asks on a terminal in its usual mode. When ctx ends the read goes on, until a line comes or the
// process ends.
func (o *operator) askOnce(ctx context.Context, question string) (string, bool) {
	fmt.Fprint(o.err, question)
	line := make(chan string, 1)
	go func() {
		text, err := bufio.NewReader(o.in).ReadString('\n')
		if err != nil {
			text = ""
		}
		line <- text
	}()
	select {
	case text := <-line:
		return text, true
	case <-ctx.Done():
		return "", false
	}
}

// lines takes a turn per line, without a prompt. A turn that fails does not keep the next from being taken, and makes
// the command fail.
func (o *operator) lines(ctx context.Context) error {
	show := o.shower()
	var first error
	err := o.eachLine(ctx, func(line string) (bool, error) {
		var err error
		switch line = strings.TrimSpace(line); {
		case line == "/quit":
			return false, nil
		case strings.HasPrefix(line, "/"):
			err = o.command(ctx, line, show.event)
		default:
			var done operate.Done
			done, err = o.take(ctx, o.message(line), show.event)
			show.end()
			err = o.failure(ctx, done, err)
		}
		if err != nil && ctx.Err() == nil {
			o.complain(exitFailed, err)
			first, err = &exitError{exitFailed, nil}, nil
		}
		return true, err
	})
	return errors.Join(cmp.Or(err, first), show.failed)
}
