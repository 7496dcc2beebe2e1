package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

func (c *cli) operateCommand() *cobra.Command {
	var id, agent string
	var wait, watch bool
	cmd := &cobra.Command{
		Use:   "operate [MESSAGE]",
		Short: "Talk to the agent as its admin",
		Long: `Talk to the agent as its admin. MESSAGE runs one turn; a pipe runs one turn per line; a terminal is interactive
(/help lists commands). The answer goes to stdout; tool calls, approvals and the trace id go to stderr, except on a
terminal.

One admin works at a time and holds the lane operate; heartbeats yield. A second admin gets the holder's name and exit
code 75, can queue (--wait) or watch (--watch).

^C cancels the turn; ^D leaves. On a terminal it asks for each approval: y approves exactly the shown call, an empty
line leaves it open, and any other text rejects it with that reason. Elsewhere the approval stays open (agent approvals
ls), the exit code is 1, and a process that runs agent serve resumes the turn. The exit code is also 1 for a turn without
an answer: the model stalled, or a limit of tokens, money, time or model calls was reached.`,
		Example: "  agent operate\n  agent operate 'how large are the tables?'\n  agent operate --session ses_… 'and the " +
			"indexes?' --json",
		Args: messageArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			if watch && (len(args) > 0 || wait || id != "" || agent != "") {
				return usageError("--watch excludes a message, --wait, --agent and --session")
			}
			if id != "" && threads.CheckID(id) != nil {
				return usageError("--session: %w", threads.ErrInvalid)
			}
			c.talks = true
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app.App) error {
				if watch {
					return c.watchOperate(ctx, a)
				}
				return c.operate(ctx, s, a, operateOptions{id, agent, wait}, args)
			})
		},
	}
	cmd.Flags().StringVar(&id, "session", "", "continue this session")
	cmd.Flags().StringVar(&agent, "agent", "", "talk to this agent instead of the session's or the default one")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait until the lane operate is free")
	cmd.Flags().BoolVar(&watch, "watch", false, "watch the current admin, read only, until ^C")
	return cmd
}

// withApp runs a command that runs executions in its own process. The session that work gets waits a second for a lock,
// as in withPromptSession.
func (c *cli) withApp(ctx context.Context, work func(context.Context, *session, *app.App) error) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	prompt, err := s.prompt(ctx)
	if err != nil {
		return err
	}
	defer prompt.Pool.Close()
	if _, err := builtins.Put(ctx, prompt.Pool); err != nil {
		return err
	}
	model, _, stop, err := app.NewModel(ctx, s.config, s.log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	return a.RunWithLeases(ctx, func(ctx context.Context) error { return work(acting(ctx), prompt, a) })
}

type operateOptions struct {
	id, agent string
	wait      bool
}

// operate runs turns from the argument, the terminal or the pipe.
func (c *cli) operate(ctx context.Context, s *session, a *app.App, which operateOptions, args []string) (err error) {
	admin, err := a.Operate.Session(which.id, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, admin.Close(ctx)) }()
	if err := admin.SetAgent(ctx, which.agent); err != nil {
		return err
	}
	o := &operator{cli: c, s: s, app: a, admin: admin}
	calls := len(args) > 0 && c.host != nil && c.sent.Asks // a line of a remote console
	if calls && strings.HasPrefix(args[0], "/") {
		// A command needs no lane. With it, this process resumes the turn that waited for a decision, and shows it.
		if decides(args[0]) {
			if err := admin.Hold(ctx, false); err != nil && !errors.Is(err, lanes.ErrBusy) {
				return err
			}
		}
		return o.runCallersLine(ctx, args[0])
	}
	if err := c.acquireLane(ctx, a, admin, which.wait); err != nil {
		return err
	}
	switch {
	case calls:
		return o.runCallersLine(ctx, args[0])
	case len(args) > 0:
		return o.runOnce(ctx, args[0])
	case !c.json && terminal(c.in) && terminal(c.out):
		return o.interact(ctx)
	}
	return o.runLines(ctx)
}

// decides reports whether a line decides an approval.
func decides(line string) bool {
	name, _, _ := strings.Cut(line, " ")
	return slashScopes[name] == principals.ApprovalsDecide
}

// A turn ends within a moment after its console leaves. Another console may hold the session's lane for long.
const (
	leavingLimit = 3 * time.Second
	leavingPoll  = 50 * time.Millisecond
)

// acquireLane acquires the lane operate, or reports its holder.
func (c *cli) acquireLane(ctx context.Context, a *app.App, admin *operate.Session, wait bool) error {
	for began := time.Now(); c.host != nil && c.sent.Asks && time.Since(began) < leavingLimit; {
		holder, err := a.Operate.Holder(ctx)
		if err != nil {
			return err
		}
		if holder.SessionID != admin.ID() {
			break
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(leavingPoll):
		}
	}
	err := admin.Hold(ctx, false)
	busy, ok := errors.AsType[*lanes.BusyError](err)
	if !ok {
		return err
	}
	explanation := errors.New(a.Operate.Explain(ctx, busy))
	if !wait {
		a.Operate.RecordSkipped(ctx, admin.ID(), busy)
		return &exitError{exitBusy, hint(explanation, "wait with --wait, or watch with --watch")}
	}
	c.infof("%s; waiting …", printable(explanation.Error()))
	if err = admin.Hold(ctx, true); errors.Is(err, lanes.ErrBusy) {
		return &exitError{exitBusy, err}
	}
	return err
}

// watchOperate prints another admin's turns until ctx ends.
func (c *cli) watchOperate(ctx context.Context, a *app.App) error {
	show := c.newEventPrinter()
	if err := a.Operate.Watch(ctx, show.print); err != nil {
		return err
	}
	if show.err != nil {
		return fmt.Errorf("print events: %w", show.err)
	}
	return nil
}

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
	askCaller func(a operate.Approval, execution string)
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
	var asked atomic.Bool // a remote caller; if it leaves, the approval stays open
	defer context.AfterFunc(ctx, func() {
		cancel(map[bool]error{true: operate.ErrDetach, false: operate.ErrInterrupt}[asked.Load()])
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
		show(e)
		asked.Store(false)
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

const ownCallRefused = "You requested this call. Another approver must decide it."

// ownCall reports whether four eyes keep the admin, who could be asked, from deciding a call.
func (o *operator) ownCall(ctx context.Context, a operate.Approval) bool {
	who := principals.From(ctx)
	if who == nil || who.Name == principals.Root || o.ask == nil && o.askCaller == nil {
		return false
	}
	got, err := approvals.Get(ctx, o.s.Pool, a.ID)
	if err != nil {
		o.s.log.WarnContext(ctx, "the requesters of an approval are not known", "approval", a.ID, "error", err)
	}
	return got.Own(who.Name)
}

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

// turnError returns the error that ends the command after a turn, or nil for an answered turn.
func (o *operator) turnError(ctx context.Context, done operate.Done, err error) error {
	switch {
	case ctx.Err() != nil:
		return &exitError{exitInterrupted, nil}
	case err != nil:
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
		return true, err
	})
	return errors.Join(cmp.Or(err, first), show.err)
}

const slashHelp = `/trace [ID]           show a turn's trace; default the latest
/lanes                list held lanes
/approvals            list pending approvals
/approve ID           approve a call once
/reject ID [REASON]   reject a call
/objectives           list objectives
/memory [WORDS]       search the memory
/help                 show this list
/quit                 leave, like ^D; ^C cancels a turn
`

// slashScopes are the scopes that slash commands need on a server: those of the commands that do the same.
var slashScopes = map[string]principals.Scope{
	"/trace": principals.RunsRead, "/lanes": principals.RunsRead, "/objectives": principals.RunsRead,
	"/memory": principals.ThreadsRead, "/approvals": principals.ApprovalsRead,
	"/approve": principals.ApprovalsDecide, "/reject": principals.ApprovalsDecide,
}

// runCommand runs a slash command.
func (o *operator) runCommand(ctx context.Context, line string, show func(operate.Event)) error {
	name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	rest = strings.TrimSpace(rest)
	if scope := slashScopes[name]; o.host != nil && scope != "" && !mayRun(ctx, scope) {
		return forbidden(ctx, name, scope)
	}
	switch name {
	case "/help":
		_, err := fmt.Fprint(o.out, slashHelp)
		return err
	case "/trace":
		if rest = cmp.Or(rest, o.lastTrace); rest == "" {
			latest, err := threads.Messages(ctx, o.s.Pool, threads.MessageFilter{ThreadID: o.admin.ID(), Limit: 1})
			if err != nil {
				return err
			}
			if len(latest) == 0 || latest[0].TraceID == "" {
				return errors.New("no turn yet; name a trace")
			}
			rest = latest[0].TraceID
		}
		return o.showTrace(ctx, o.s, rest)
	case "/lanes":
		return o.showLanes(ctx)
	case "/approvals":
		return o.showApprovals(ctx)
	case "/objectives":
		return o.showObjectives(ctx)
	case "/memory":
		return o.showMemory(ctx, rest)
	case "/approve", "/reject":
		id, reason, _ := strings.Cut(rest, " ")
		return o.decideApproval(ctx, id, name == "/approve", strings.TrimSpace(reason), show)
	}
	return fmt.Errorf("unknown command %s; see /help", printable(name))
}

// decideApproval decides an approval and resumes the turn of this session that waits for it. It shows the end of a turn
// that another process has finished since.
func (o *operator) decideApproval(
	ctx context.Context, id string, approve bool, reason string, show func(operate.Event),
) error {
	if id == "" {
		return errors.New("name an approval; /approvals lists them")
	}
	decided, err := o.recordDecision(ctx, id, approve, reason)
	if err != nil {
		return err
	}
	turns, err := executions.List(ctx, o.s.Pool, executions.Filter{
		TraceIDs: []trace.ID{trace.ID(decided.TraceID)}, Flow: operate.Flow, Limit: 1,
	})
	if err != nil {
		return err
	}
	if len(turns) == 0 || postgres.Deref(turns[0].ThreadID) != o.admin.ID() || endedBefore(turns[0], decided.DecidedAt) {
		_, err := fmt.Fprintf(o.out, "%s %s\n", map[bool]string{true: "approved", false: "rejected"}[approve], printable(id))
		return err
	}
	done, err := o.runTurn(ctx, func(ctx context.Context, emit func(operate.Event)) (operate.Done, error) {
		return o.admin.Resume(ctx, turns[0].ID, emit)
	}, show)
	return o.turnError(ctx, done, err)
}

func endedBefore(x executions.Execution, at *time.Time) bool {
	return x.CompletedAt != nil && at != nil && x.CompletedAt.Before(*at)
}

// showRows prints a table on the console.
func showRows[T any](o *operator, empty string, heading []string, items []T, row func(T) []string) error {
	out := &errWriter{w: o.out}
	writeRows(out, empty, heading, items, row)
	return out.err
}

func (o *operator) showLanes(ctx context.Context) error {
	live, err := lanes.Live(ctx, o.s.Pool)
	if err != nil {
		return err
	}
	return showRows(o, "no lane is held",
		[]string{"LANE", "HELD BY", "TRACE", "HELD FOR"}, live, func(l lanes.LiveLane) []string {
			return []string{l.Lane, l.LockedBy, postgres.Deref(l.TraceID), human.Seconds(l.HeldFor)}
		})
}

func (o *operator) showApprovals(ctx context.Context) error {
	waiting, err := approvals.Pending(ctx, o.s.Pool, 200)
	if err != nil {
		return err
	}
	return showRows(o, "no pending approvals",
		[]string{"APPROVAL", "SKILL", "ARGUMENTS", "EXPIRES", "TRACE"}, waiting, func(a approvals.Approval) []string {
			return []string{a.ID, a.SkillName, string(a.Arguments), formatTime(a.ExpiresAt), a.TraceID}
		})
}

func (o *operator) showObjectives(ctx context.Context) error {
	all, err := objectives.List(ctx, o.s.Pool, objectives.Filter{})
	if err != nil {
		return err
	}
	return showRows(o, "no objectives",
		[]string{"OBJECTIVE", "STATUS", "DONE", "GOAL"}, all, func(x objectives.Objective) []string {
			return []string{x.Name, x.Status, fmt.Sprintf("%d of %d", x.Done, x.Total), truncate(x.Goal, 80)}
		})
}

func (o *operator) showMemory(ctx context.Context, query string) error {
	index, err := app.NewIndex(o.s.config, o.s.log)
	if err != nil {
		return err
	}
	found, err := index.Search(ctx, o.s.Pool, memory.Shared, query, 20)
	if err != nil {
		return err
	}
	return showRows(o, "no memories",
		[]string{"CATEGORY", "KEY", "VALUE", "WRITTEN"}, found, func(m memory.Entry) []string {
			return []string{m.Category, m.Key, truncate(string(m.Value), 80), formatTime(m.UpdatedAt)}
		})
}
