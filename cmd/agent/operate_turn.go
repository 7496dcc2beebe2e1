package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

// operator is an admin's session on the command line.
type operator struct {
	*cli
	s         *session
	app       *app.App
	admin     *operate.Session
	lastTrace string // of the latest turn
	own       bool   // another person must decide the latest approval
	// ask asks the admin a question; nil means nobody can answer. heard is false when the input ended or the call was
	// decided elsewhere.
	ask func(ctx context.Context, question string) (answer string, heard bool)
	// askCaller, if set, replaces ask: it asks a remote caller, whose client decides by a separate command.
	askCaller   func(a operate.Approval, execution string)
	endQuestion func() // ends the question of askCaller
	// onEvent, if set, is called before each event is printed.
	onEvent func(e operate.Event)
}

// turn is Session.Turn or Session.Resume.
type turn func(ctx context.Context, emit func(operate.Event)) (operate.Done, error)

func (o *operator) message(text string) turn {
	return func(ctx context.Context, emit func(operate.Event)) (operate.Done, error) {
		return o.admin.Turn(ctx, text, false, emit)
	}
}

// runTurn runs a turn and prints its events. When ctx ends, it cancels the turn and waits for it.
func (o *operator) runTurn(ctx context.Context, t turn, show func(operate.Event)) (operate.Done, error) {
	turnCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	var asked atomic.Bool // a remote caller is asked about an approval
	defer context.AfterFunc(ctx, func() {
		if asked.Load() {
			cancel(operate.ErrDetach) // the caller disconnected: the approval stays open
		} else {
			cancel(operate.ErrInterrupt)
		}
	})()
	var done operate.Done
	var err error
	events := make(chan operate.Event, 256)
	go func() { // ends before runTurn returns
		defer close(events)
		done, err = t(turnCtx, func(e operate.Event) {
			if o.onEvent != nil {
				o.onEvent(e)
			}
			events <- e
		})
	}()
	execution := ""
	for e := range events {
		if asked.Swap(false) {
			o.endQuestion()
		}
		show(e)
		switch data := e.Data.(type) {
		case operate.Start:
			o.lastTrace, execution = data.TraceID, data.ExecutionID
		case operate.Approval:
			switch o.own = o.ownCall(turnCtx, data); {
			case o.own:
				o.infof(ownCallRefused)
				cancel(operate.ErrDetach)
			case o.askCaller != nil:
				asked.Store(true)
				o.askCaller(data, execution)
			case !o.askApproval(turnCtx, data):
				cancel(operate.ErrDetach)
			}
		}
	}
	return done, err
}

// turnError returns the error that ends the command after a turn, or nil for an answered turn.
func (o *operator) turnError(ctx context.Context, done operate.Done, err error) error {
	switch {
	case ctx.Err() != nil:
		return &exitError{exitInterrupted, nil}
	case err != nil:
		if failed, ok := errors.AsType[*problem.Problem](err); ok && failed.TraceID != "" {
			err = hint(err, "see agent trace %s", failed.TraceID)
		}
		return &tracedError{err, o.lastTrace}
	case done.Ended == operate.WaitingApproval:
		return &tracedError{hint(errors.New("the turn waits for approval"),
			"decide with agent approvals; a process that runs `agent serve` resumes it"), o.lastTrace}
	case done.Ended != reason.Answered && done.Ended != operate.HandedOn:
		return &tracedError{errors.New("the turn has no answer: " + endReason(done.Ended)), o.lastTrace}
	}
	return nil
}

// endReason explains a turn that ended without an answer.
func endReason(ended string) string {
	if ended == reason.Stalled {
		return "the model stalled"
	}
	why := "its limit of " + ended + " was reached"
	if setting := limitSettings[ended]; setting != "" {
		why += "; see " + setting
	}
	return why
}

// limitSettings maps a limit to the settings that raise it. An agent's document may have a lower limit.
var limitSettings = map[string]string{
	"day":        "AGENT_BUDGET_DAY_TOKENS and AGENT_BUDGET_DAY_USD",
	"surface":    "AGENT_BUDGET_OPERATE_TOKENS, AGENT_BUDGET_OPERATE_USD and limits.day_usd of the agent",
	"tokens":     "AGENT_MAX_TOKENS and limits.tokens of the agent",
	"money":      "AGENT_MAX_COST_USD and limits.cost_usd of the agent",
	"iterations": "AGENT_MAX_ITERATIONS and limits.iterations of the agent",
	"time":       "AGENT_RUN_TIMEOUT",
}

// ownCall reports whether four eyes keep the admin, who could be asked, from deciding a call.
func (o *operator) ownCall(ctx context.Context, a operate.Approval) bool {
	who := principals.From(ctx)
	if who == nil || who.Name == principals.Root || o.ask == nil && o.askCaller == nil {
		return false
	}
	pending, err := approvals.Get(ctx, o.s.Pool, a.ID)
	if err != nil {
		o.s.log.WarnContext(ctx, "the requesters of an approval are not known", "approval", a.ID, "error", err)
	}
	return pending.Own(who.Name)
}

const ownCallRefused = "You requested this call. Another approver must decide it."

// askApproval asks the admin to approve a call. It returns false if the approval stays open.
func (o *operator) askApproval(ctx context.Context, a operate.Approval) bool {
	if o.ask == nil {
		return false
	}
	answer, heard := o.ask(ctx, approvalQuestion)
	answer = strings.TrimSpace(answer)
	switch {
	case !heard:
		return true // decided elsewhere
	case answer == "":
		return false
	}
	approve, reason := readDecision(answer)
	if _, err := o.recordDecision(ctx, a.ID, approve, reason); err != nil {
		o.infof("agent: %s", printable(err.Error()))
	}
	return true
}

const approvalQuestion = "approve? [y, n, or why not; empty leaves it open] "

// readDecision reads the answer to approvalQuestion. Any answer but yes and no is the reason of a rejection.
func readDecision(answer string) (approve bool, reason string) {
	switch strings.ToLower(answer) {
	case "y", "yes":
		return true, ""
	case "n", "no":
		return false, ""
	}
	return false, answer
}

func (o *operator) recordDecision(
	ctx context.Context, id string, approve bool, reason string,
) (approvals.Approval, error) {
	decided, err := approvals.Decide(ctx, o.s.Pool, id, approve, actor(ctx), reason)
	o.admin.Wake()
	return decided, err
}

func (o *operator) runOnce(ctx context.Context, text string) error {
	if terminal(o.in) && terminal(o.err) {
		o.ask = o.askTerminal
	}
	if o.json {
		return o.runOnceJSON(ctx, text)
	}
	show := o.newEventPrinter()
	done, err := o.runTurn(ctx, o.message(text), show.print)
	show.endLine()
	return errors.Join(o.turnError(ctx, done, err), show.err)
}

func (o *operator) runOnceJSON(ctx context.Context, text string) error {
	answer := operate.Answer{Tools: []operate.ToolCall{}, Approvals: []operate.Approval{}}
	o.ask = nil
	done, err := o.runTurn(ctx, o.message(text), answer.Add)
	if err != nil {
		return o.turnError(ctx, done, err)
	}
	answer.Done = done
	return errors.Join(o.print(answer, nil), o.turnError(ctx, done, nil))
}

// askTerminal reads one line in cooked mode. After ctx ends, the blocked read ends with the next line or the process.
func (o *operator) askTerminal(ctx context.Context, question string) (string, bool) {
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

// runLines runs one turn per input line. A failed turn fails the command, but the next lines still run.
func (o *operator) runLines(ctx context.Context) error {
	show := o.newEventPrinter()
	var first error
	err := o.eachLine(ctx, func(line string) (bool, error) {
		var err error
		switch line = strings.TrimSpace(line); {
		case line == "/quit":
			return false, nil
		case strings.HasPrefix(line, "/"):
			err = o.runCommand(ctx, line, show.print)
		default:
			var done operate.Done
			done, err = o.runTurn(ctx, o.message(line), show.print)
			show.endLine()
			err = o.turnError(ctx, done, err)
		}
		if err != nil && ctx.Err() == nil {
			o.reportError(exitFailed, err)
			first, err = &exitError{exitFailed, nil}, nil
		}
		return show.err == nil, err
	})
	return errors.Join(cmp.Or(err, first), show.err)
}
