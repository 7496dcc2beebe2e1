package engineroom

import (
	"context"
	_ "embed"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// attentionSQL finds the newest items of each kind that need a person, and their number.
//
//go:embed attention.sql
var attentionSQL string

// attentionKind is a kind of item that needs a person.
type attentionKind struct {
	Kind, Title string
	List        string // URL of the list
	item        string // URL of an item; its escaped id follows
	Total       int64  // counted up to countLimit
	Items       []attentionItem
}

// attentionKinds lists all kinds in display order, beginning with kinds that block people.
func attentionKinds() []attentionKind {
	return []attentionKind{
		{Kind: "approval", Title: "Approvals requested", List: "/approvals?status=pending", item: "/approvals/"},
		{Kind: "request", Title: "Unanswered requests", List: "/executions?view=waiting", item: "/executions/"},
		{Kind: "objective", Title: "Proposed objectives", List: "/objectives?status=proposed", item: "/objectives/"},
		{Kind: "automation", Title: "Proposed automations", List: "/automations#proposals", item: "/automations/"},
		{Kind: "conflict", Title: "Open memory conflicts", List: "/memory#conflicts", item: "/memory#conflict-"},
		{Kind: "skill", Title: "Disabled skills", List: "/skills?state=disabled", item: "/skills/"},
		{Kind: "stuck", Title: "Stuck executions", List: "/executions?view=stuck", item: "/executions/"},
		{Kind: "stall", Title: "Stalled turns", List: "/activity?skill=reasoning&status=error", item: "/traces/"}, // of a day
		{Kind: "run", Title: "Failed automation runs", List: "/automations#dead", item: "/automations/"},
		{Kind: "delivery", Title: "Failed webhook deliveries", List: "/deliveries?status=dead", item: "/deliveries/"},
		{Kind: "outgoing", Title: "Failed outgoing webhooks", List: "/outgoing?status=dead", item: "/outgoing/"},
		{Kind: "message", Title: "Undelivered messages", List: "/threads?view=undelivered", item: "/threads/"},
		{Kind: "channel", Title: "Broken channels", List: "/channels", item: "/channels#channel-"},
	}
}

// attentionItem is one item.
type attentionItem struct {
	Kind, Name, Target, Note string
	At                       time.Time
	Total                    int64
	Call                     *approvalRow `db:"-"` // of an approval
}

// maxPerKind bounds the named items of one kind.
const maxPerKind = 3

// attentionItems reads the items. Of a kind whose list the viewer may not open, it returns only the number.
func (room *Room) attentionItems(ctx context.Context, req *pageRequest) (any, error) {
	items, err := postgres.Rows[attentionItem](ctx, room.Read, "list work that needs attention", attentionSQL,
		postgres.Strict{"count_limit": countLimit, "limit": maxPerKind, "hide_texts": activity.HidesTexts(ctx)})
	if err != nil {
		return nil, err
	}
	broken, err := channels.ListBroken(ctx, room.Read)
	if err != nil {
		return nil, err
	}
	for _, b := range broken[:min(len(broken), maxPerKind)] {
		items = append(items, attentionItem{
			Kind: "channel", Name: b.Name, Target: b.Name, Note: strings.TrimSuffix(b.State+": "+b.Error, ": "), At: b.Since,
			Total: int64(len(broken)),
		})
	}
	calls, err := room.pendingCalls(ctx, items)
	if err != nil {
		return nil, err
	}
	var list []attentionKind
	for _, kind := range attentionKinds() {
		for _, n := range items {
			if n.Kind != kind.Kind {
				continue
			}
			n.Call, kind.Total = calls[n.Target], n.Total
			if req.mayOpen(kind.List) {
				kind.Items = append(kind.Items, n)
			}
		}
		if kind.Total > 0 {
			list = append(list, kind)
		}
	}
	return map[string]any{"Needs": list}, nil
}

// Unnamed is the number of items that the page only counts.
func (n attentionKind) Unnamed() int64 { return n.Total - int64(len(n.Items)) }

// Label is the title for one item or for several.
func (n attentionKind) Label() string {
	if n.Total == 1 {
		return singularNouns.Replace(n.Title)
	}
	return n.Title
}

// singularNouns replaces the nouns of titles by their singular.
var singularNouns = strings.NewReplacer("Approvals", "Approval", "requests", "request", "objectives", "objective",
	"automations", "automation", "conflicts", "conflict", "skills", "skill", "executions", "execution", "runs", "run",
	"deliveries", "delivery", "channels", "channel", "turns", "turn")

// Noun is the title within a sentence.
func (n attentionKind) Noun() string { return strings.ToLower(n.Title[:1]) + n.Title[1:] }

// Path is the item's URL, without its id.
func (n attentionKind) Path() string { return n.item }

// maxInlineArguments bounds the arguments, in bytes, that a person can read and approve on the overview. Longer
// arguments have a page of their own.
const maxInlineArguments = 3000

// pendingCalls reads the calls of the named approvals, by id. Arguments are exact, as on the approval's page.
func (room *Room) pendingCalls(ctx context.Context, items []attentionItem) (map[string]*approvalRow, error) {
	ids := []string{}
	for _, n := range items {
		if n.Kind == "approval" {
			ids = append(ids, n.Target)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	list, err := postgres.Rows[approvalRow](ctx, room.Read, "read approvals", selectApproval+`
		 where a.id = any (@ids::uuid[])`, postgres.Strict{"ids": ids, "time": "", "listed": maxInlineArguments})
	calls := map[string]*approvalRow{}
	for i := range list {
		calls[list[i].ID] = &list[i]
	}
	return calls, err
}
