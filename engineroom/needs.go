package engineroom

import (
	"context"
	_ "embed" // the statement is in a file of its own
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// needsSQL finds what waits for a person: of each kind the newest few, and how many there are.
//
//go:embed needs.sql
var needsSQL string

// mostOfAKind is how many of one kind the overview names.
const mostOfAKind = 3

// need is a kind of thing that waits for a person.
type need struct {
	Kind, Title string
	List        string // where all of them are
	item        string // where one is; its target follows, escaped
	Total       int64  // counted up to beyond
	Items       []needed
}

// needed is one of them.
type needed struct {
	Kind, Name, Target, Note string
	At                       time.Time
	Total                    int64
}

// Path is where the item is, without the target's escaping.
func (n need) Path() string { return n.item }

// kindsOfNeed are all kinds, in the order in which they are shown: what somebody waits for comes first.
func kindsOfNeed() []need {
	return []need{
		{Kind: "approval", Title: "Approvals to decide", List: "/approvals?status=pending", item: "/approvals/"},
		{Kind: "request", Title: "Requests that people have not answered", List: "/executions?view=waiting", item: "/executions/"},
		{Kind: "objective", Title: "Objectives the agent proposes", List: "/objectives?status=proposed", item: "/objectives/"},
		{Kind: "automation", Title: "Automations the agent proposes", List: "/automations?state=disabled", item: "/automations/"},
		{Kind: "conflict", Title: "Memory conflicts to decide", List: "/memory#conflicts", item: "/memory#conflict-"},
		{Kind: "skill", Title: "Skills out of service", List: "/skills", item: "/skills/"},
		{Kind: "stuck", Title: "Executions that are stuck", List: "/executions?view=stuck", item: "/executions/"},
		{Kind: "run", Title: "Automation runs given up", List: "/automations#dead", item: "/automations/"},
		{Kind: "delivery", Title: "Webhook deliveries given up", List: "/deliveries?status=dead", item: "/deliveries/"},
		{Kind: "outgoing", Title: "Outgoing webhooks given up", List: "/outgoing?status=dead", item: "/outgoing/"},
		{Kind: "message", Title: "Messages that could not be delivered", List: "/threads", item: "/threads/"},
	}
}

// needs reads what waits for a person.
func (room *Room) needs(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, needsSQL, postgres.Strict{"beyond": beyond, "most": mostOfAKind})
	if err != nil {
		return nil, fmt.Errorf("list what needs a person: %w", err)
	}
	found, err := pgx.CollectRows(rows, pgx.RowToStructByName[needed])
	if err != nil {
		return nil, fmt.Errorf("list what needs a person: %w", err)
	}
	var list []need
	for _, kind := range kindsOfNeed() {
		for _, n := range found {
			if n.Kind == kind.Kind {
				kind.Total = n.Total
				kind.Items = append(kind.Items, n)
			}
		}
		if kind.Total > 0 {
			list = append(list, kind)
		}
	}
	return map[string]any{"Needs": list}, nil
}
