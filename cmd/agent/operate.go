package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/builtins"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/reason"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/threads"
)

func (c *cli) operateCommand() *cobra.Command {
	var id, agent string
	var wait, watch bool
	cmd := &cobra.Command{
		Use:   "operate [MESSAGE]",
		Short: "Talk with the agent as its admin",
		Long: `Talk with the agent as its admin: on a terminal line by line (/help lists what else can be done there), from a pipe one
turn per line, with MESSAGE one turn. The answer goes to stdout; tool calls, approvals and the trace id go to stderr, except
on a terminal.

One admin works at a time: the lane operate is held meanwhile, heartbeats give way, and whoever comes second is told who is
at work (exit 75), may stand in the queue (--wait) or look on (--watch).

^C cancels the turn and stops what it does; ^D leaves. A call that needs leave is asked for where there is somebody to ask: y
approves exactly the call that is shown, nothing leaves it open, anything else refuses it and is the reason. Elsewhere it
stays open (agent approvals ls), the exit code is 1, and the turn goes on in a process that runs agent serve. The exit code is 1 also
for a turn without an answer: the model stalled, or a limit of tokens, money, time or model calls was reached.`,
		Example: "  agent operate\n  agent operate 'how large are the tables?'\n  agent operate --session ses_… 'and the indexes?' --json",
		Args:    message,
		RunE: func(cmd *cobra.Command, args []string) error {
			if watch && (len(args) > 0 || wait || id != "" || agent != "") {
				return usageError("--watch goes with no message, no --wait, no --agent and no --session")
			}
			if id != "" && threads.CheckID(id) != nil {
				return usageError("--session: %w", threads.ErrInvalid)
			}
			return c.withApp(cmd.Context(), func(ctx context.Context, s *session, a *app) error {
				if watch {
					return c.watchOperate(ctx, a)
				}
				return c.operate(ctx, s, a, sessionOf{id, agent, wait}, args)
			})
		},
	}
	cmd.Flags().StringVar(&id, "session", "", "go on with this session")
	cmd.Flags().StringVar(&agent, "agent", "", "talk with this agent instead of the session's or the default one")
	cmd.Flags().BoolVar(&wait, "wait", false, "wait while another admin is at work")
	cmd.Flags().BoolVar(&watch, "watch", false, "follow the admin who is at work, read only, until ^C")
	return cmd
}

// withApp runs a command's work in a process that runs executions itself.
func (c *cli) withApp(ctx context.Context, work func(context.Context, *session, *app) error) error {
	s, err := c.session(ctx)
	if err != nil {
		return err
	}
	defer s.close(ctx)
	if _, err := builtins.Put(ctx, s.pool); err != nil {
		return err
	}
	model, _, stop, err := newModel(ctx, s.config, s.log, models.Retry{})
	if err != nil {
		return err
	}
	defer stop()
	a, err := c.app(s, model)
	if err != nil {
		return err
	}
	return a.beat(ctx, func(ctx context.Context) error { return work(ctx, s, a) })
}

// sessionOf says which session is meant.
type sessionOf struct {
	id, agent string
	wait      bool
}

// operate takes turns in the way that suits where the words come from.
func (c *cli) operate(ctx context.Context, s *session, a *app, which sessionOf, args []string) (err error) {
	admin, err := a.operate.Session(which.id, true)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, admin.Close(ctx)) }()
	if err := admin.As(ctx, which.agent); err != nil {
		return err
	}
	if err := c.enter(ctx, a, admin, which.wait); err != nil {
		return err
	}
	o := &operator{cli: c, s: s, app: a, admin: admin, left: map[string]string{}}
	switch {
	case len(args) > 0:
		return o.once(ctx, args[0])
	case !c.json && terminal(c.in) && terminal(c.out):
		return o.converse(ctx)
	}
	return o.lines(ctx)
}

// enter takes the lane, and says who has it when it is not free.
func (c *cli) enter(ctx context.Context, a *app, admin *operate.Session, wait bool) error {
	err := admin.Hold(ctx, false)
	busy, ok := errors.AsType[*lanes.BusyError](err)
	if !ok {
		return err
	}
	told := errors.New(a.operate.Explain(ctx, busy))
	if !wait {
		a.operate.RecordSkipped(ctx, admin.ID(), busy)
		return &exitError{exitBusy, hint(told, "wait with --wait, or look on with --watch")}
	}
	c.say("%s; waiting …", printable(told.Error()))
	if err = admin.Hold(ctx, true); errors.Is(err, lanes.ErrBusy) {
		return &exitError{exitBusy, err}
	}
	return err
}

// watchOperate looks on until ctx ends, which is no failure.
func (c *cli) watchOperate(ctx context.Context, a *app) error {
	show := c.shower()
	if err := a.operate.Watch(ctx, show.event); err != nil {
		return err
	}
	if show.failed != nil {
		return fmt.Errorf("print events: %w", show.failed)
	}
	return nil
}

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

// slashHelp is what /help says.
const slashHelp = `/trace [ID]           what a turn did; without an id, the latest turn
/lanes                who holds what
/approvals            calls that wait for leave
/approve ID           allow a call, once
/reject ID [REASON]   refuse a call
/objectives           what the agent pursues
/memory [WORDS]       what it remembers
/help                 this
/quit                 leave, as ^D does; ^C cancels a turn
`

// command does what a line that begins with a slash says.
func (o *operator) command(ctx context.Context, line string, show func(operate.Event)) error {
	name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	rest = strings.TrimSpace(rest)
	switch name {
	case "/help":
		_, err := fmt.Fprint(o.out, slashHelp)
		return err
	case "/trace":
		if rest == "" {
			rest = o.last
		}
		if rest == "" {
			return errors.New("no turn was taken yet; name a trace")
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
		return o.settle(ctx, id, name == "/approve", strings.TrimSpace(reason), show)
	}
	return fmt.Errorf("there is no command %s; /help lists them", printable(name))
}

// settle decides an approval, and goes on with the turn of this session that waits for it.
func (o *operator) settle(ctx context.Context, id string, approve bool, reason string, show func(operate.Event)) error {
	if id == "" {
		return errors.New("name an approval; /approvals lists them")
	}
	if err := o.record(ctx, id, approve, reason); err != nil {
		return err
	}
	execution := o.left[id]
	delete(o.left, id)
	if execution == "" {
		_, err := fmt.Fprintf(o.out, "%s %s\n", map[bool]string{true: "approved", false: "rejected"}[approve], printable(id))
		return err
	}
	done, err := o.take(ctx, func(ctx context.Context, emit func(operate.Event)) (operate.Done, error) {
		return o.admin.Resume(ctx, execution, emit)
	}, show)
	return o.failure(ctx, done, err)
}

func (o *operator) showLanes(ctx context.Context) error {
	live, err := lanes.Live(ctx, o.s.pool)
	if err != nil {
		return err
	}
	rows := make([][]string, len(live))
	for i, l := range live {
		rows[i] = []string{l.Lane, l.LockedBy, deref(l.TraceID), seconds(l.HeldFor)}
	}
	return table(o.out, "no lane is held", []string{"LANE", "HELD BY", "TRACE", "HELD FOR"}, rows)
}

func (o *operator) showApprovals(ctx context.Context) error {
	waiting, err := approvals.Pending(ctx, o.s.pool, 200)
	if err != nil {
		return err
	}
	rows := make([][]string, len(waiting))
	for i, a := range waiting {
		rows[i] = []string{a.ID, a.SkillName, string(a.Arguments), when(a.ExpiresAt), a.TraceID}
	}
	return table(o.out, "nothing waits for approval", []string{"APPROVAL", "SKILL", "ARGUMENTS", "EXPIRES", "TRACE"}, rows)
}

func (o *operator) showObjectives(ctx context.Context) error {
	all, err := objectives.List(ctx, o.s.pool, objectives.Filter{})
	if err != nil {
		return err
	}
	rows := make([][]string, len(all))
	for i, x := range all {
		rows[i] = []string{x.Name, x.Status, fmt.Sprintf("%d of %d", x.Done, x.Total), clipped(x.Goal, 80)}
	}
	return table(o.out, "there is no objective", []string{"OBJECTIVE", "STATUS", "DONE", "GOAL"}, rows)
}

func (o *operator) showMemory(ctx context.Context, query string) error {
	index, err := newIndex(o.s.config, o.s.log)
	if err != nil {
		return err
	}
	found, err := index.Search(ctx, o.s.pool, memory.Shared, query, 20)
	if err != nil {
		return err
	}
	rows := make([][]string, len(found))
	for i, m := range found {
		rows[i] = []string{m.Category, m.Key, clipped(string(m.Value), 80), when(m.UpdatedAt)}
	}
	return table(o.out, "nothing is remembered", []string{"CATEGORY", "KEY", "VALUE", "WRITTEN"}, rows)
}
