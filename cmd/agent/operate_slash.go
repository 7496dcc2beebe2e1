package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

// runCommand runs a slash command. With --json its result is an event for show.
func (o *operator) runCommand(ctx context.Context, line string, show func(operate.Event)) error {
	name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	rest = strings.TrimSpace(rest)
	if scope := slashScopes[name]; o.host != nil && scope != "" && !mayRun(ctx, scope) {
		return forbidden(ctx, name, scope)
	}
	switch name {
	case "/help":
		if o.json {
			return errors.New("/help prints no JSON; see `agent operate --help`")
		}
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
		if !o.json {
			return o.showTrace(ctx, o.s, rest)
		}
		story, err := readTrace(ctx, o.s, rest)
		if err == nil {
			show(operate.Event{Name: "trace", Data: story})
		}
		return err
	case "/lanes":
		return o.showLanes(ctx, show)
	case "/approvals":
		return o.showApprovals(ctx, show)
	case "/objectives":
		return o.showObjectives(ctx, show)
	case "/memory":
		return o.showMemory(ctx, rest, show)
	case "/approve", "/reject":
		id, reason, _ := strings.Cut(rest, " ")
		return o.decideApproval(ctx, id, name == "/approve", strings.TrimSpace(reason), show)
	}
	return fmt.Errorf("unknown command %s; see /help", printable(name))
}

const slashHelp = `/trace [ID]           show a turn's trace; default the latest
/lanes                list held lanes
/approvals            list pending approvals
/approve ID           approve a call once
/reject ID [REASON]   reject a call
/objectives           list objectives
/memory [WORDS]       search the memory; at most 20 matches
/help                 show this list
/quit                 leave, like ^D; ^C cancels a turn
`

// slashScopes are the scopes that slash commands need on a server: those of the commands that do the same.
var slashScopes = map[string]principals.Scope{
	"/trace": principals.RunsRead, "/lanes": principals.RunsRead, "/objectives": principals.RunsRead,
	"/memory": principals.ThreadsRead, "/approvals": principals.ApprovalsRead,
	"/approve": principals.ApprovalsDecide, "/reject": principals.ApprovalsDecide,
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
		if o.json {
			show(operate.Event{Name: "decided", Data: decided})
			return nil
		}
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

func (o *operator) showLanes(ctx context.Context, show func(operate.Event)) error {
	live, err := lanes.Live(ctx, o.s.Pool)
	if err != nil {
		return err
	}
	return showRows(o, show, "lanes", "no lane is held",
		[]string{"LANE", "HELD BY", "TRACE", "HELD FOR"}, live, func(l lanes.LiveLane) []string {
			return []string{l.Lane, l.LockedBy, postgres.Deref(l.TraceID), human.Seconds(l.HeldFor)}
		})
}

func (o *operator) showApprovals(ctx context.Context, show func(operate.Event)) error {
	waiting, err := approvals.Pending(ctx, o.s.Pool, maxApprovals)
	if err != nil {
		return err
	}
	return showRows(o, show, "approvals", "no pending approvals",
		[]string{"APPROVAL", "SKILL", "ARGUMENTS", "EXPIRES", "TRACE"}, waiting, func(a approvals.Approval) []string {
			return []string{a.ID, a.SkillName, string(a.Arguments), formatTime(a.ExpiresAt), a.TraceID}
		})
}

func (o *operator) showObjectives(ctx context.Context, show func(operate.Event)) error {
	all, err := objectives.List(ctx, o.s.Pool, objectives.Filter{})
	if err != nil {
		return err
	}
	return showRows(o, show, "objectives", "no objectives",
		[]string{"OBJECTIVE", "STATUS", "DONE", "GOAL"}, all, func(x objectives.Objective) []string {
			return []string{x.Name, x.Status, fmt.Sprintf("%d of %d", x.Done, x.Total), truncate(x.Goal, 80)}
		})
}

// maxMatches bounds the memories that /memory shows.
const maxMatches = 20

func (o *operator) showMemory(ctx context.Context, query string, show func(operate.Event)) error {
	index, err := app.NewIndex(o.s.config, o.s.log)
	if err != nil {
		return err
	}
	found, err := index.Search(ctx, o.s.Pool, memory.Shared, query, maxMatches)
	if err != nil {
		return err
	}
	return showRows(o, show, "memory", "no memories",
		[]string{"CATEGORY", "KEY", "VALUE", "WRITTEN"}, found, func(m memory.Entry) []string {
			return []string{m.Category, m.Key, truncate(string(m.Value), 80), formatTime(m.UpdatedAt)}
		})
}

// showRows prints a table on the console. With --json it shows an event, whose data lists the items as a command does.
func showRows[T any](
	o *operator, show func(operate.Event), name, empty string, heading []string, items []T, row func(T) []string,
) error {
	if o.json {
		show(operate.Event{Name: name, Data: pageOf(items, "")})
		return nil
	}
	out := &errWriter{w: o.out}
	writeRows(out, empty, heading, items, row)
	return out.err
}
