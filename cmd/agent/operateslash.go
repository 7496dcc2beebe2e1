package main

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/objectives"
	"github.com/lanekeeper/lanekeeper/surfaces/operate"
)

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
