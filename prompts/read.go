package prompts

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/trace"
)

// MaxCalls bounds the calls of one page.
const MaxCalls = 100

// Page has model calls of a trace in order, with their prompts. Calls that share a part refer to one entry of Parts.
type Page struct {
	TraceID string          `json:"trace_id"`
	Calls   []Call          `json:"calls"`
	Parts   map[string]Part `json:"parts"`       // by digest
	Next    *string         `json:"next_cursor"` // null on the last page
}

// Call is one model call.
type Call struct {
	ActivityID string          `json:"activity_id"`
	Agent      string          `json:"agent"`
	Purpose    string          `json:"purpose"`
	Model      string          `json:"model"`
	Status     activity.Status `json:"status"`
	Step       string          `json:"step"`
	CreatedAt  time.Time       `json:"created_at"`
	TokenUsage activity.Usage  `json:"token_usage"`
	CostUSD    float64         `json:"cost_usd"`
	Recorded   bool            `json:"recorded"` // false if the prompt was never recorded, or was deleted
	Options    json.RawMessage `json:"options"`  // effort, temperature, max_tokens, schema
	Tools      *string         `json:"tools"`    // digest of the definitions; null without tools
	Messages   []string        `json:"messages"` // digests, in order
	// SharedParts counts the leading parts, tools included, that equal those of the agent's previous model call in the
	// trace. A provider may have cached them.
	SharedParts int `json:"shared_parts"`
}

// Part is a redacted message, or the tools' definitions.
type Part struct {
	Role      string          `json:"role"` // empty for the tools
	Body      json.RawMessage `json:"body"` // in the form of chat completions
	Bytes     int             `json:"bytes"`
	Truncated bool            `json:"truncated"`
	UsedOn    string          `json:"used_on"` // the last day (UTC) of a prompt with this part
}

// Filter selects calls of a trace.
type Filter struct {
	ActivityID string // only this call
	Limit      int    // at most MaxCalls, which is also the default
	Cursor     string // Page.Next of the previous page
}

// callRow is a row of the query for calls.
type callRow struct {
	Call

	ToolsDigest []byte
	Digests     [][]byte
}

// Of returns model calls of a trace. id may have any form that trace.ParseAny accepts. It returns trace.ErrInvalid,
// activity.ErrNotFound or activity.ErrCursor, wrapped.
func Of(ctx context.Context, db postgres.DB, id string, f Filter) (Page, error) {
	p, err := read(ctx, db, id, f)
	if err != nil {
		return Page{}, fmt.Errorf("read prompts of trace %s: %w", id, err)
	}
	return p, nil
}

// read returns a page of a trace's model calls, oldest first, each with the parts of its prompt. Calls refer to parts
// by digest, and a part that several calls share is returned once.
func read(ctx context.Context, db postgres.DB, id string, f Filter) (Page, error) {
	traceID, err := findTrace(ctx, db, id)
	if err != nil {
		return Page{}, err
	}
	after, err := activity.FromCursor(f.Cursor)
	if err != nil {
		return Page{}, err
	}
	limit := f.Limit
	if limit <= 0 || limit > MaxCalls {
		limit = MaxCalls
	}
	// QueryExecModeCacheDescribe plans the statement for its arguments; a generic plan would scan the log.
	rows, err := db.Query(ctx, `
		select a.id::text as activity_id, a.agent, a.purpose, a.model, a.status, a.step, a.created_at, a.token_usage,
		       a.cost_usd::float8 as cost_usd, p.activity_id is not null as recorded,
		       coalesce(p.options, '{}') as options,
		       p.tools as tools_digest, coalesce(p.messages, '{}') as digests
		  from agent_activity a
		  left join agent_prompts p on p.activity_id = a.id
		 where a.trace_id = @trace_id and a.kind = 'model'
		   and (@only::text = '' or a.id::text = @only)
		   and (@after::text is null or a.id > @after::text::uuid)
		 order by a.id
		 limit @limit::int + 1`,
		pgx.QueryExecModeCacheDescribe,
		postgres.Strict{"trace_id": traceID, "only": strings.ToLower(f.ActivityID), "after": after, "limit": limit})
	callRows, err := postgres.Collect(rows, err, "read calls", pgx.RowToStructByNameLax[callRow])
	if err != nil {
		return Page{}, err
	}
	page := Page{TraceID: traceID, Calls: []Call{}}
	if len(callRows) > limit {
		callRows = callRows[:limit]
		next := activity.ToCursor(callRows[limit-1].ActivityID)
		page.Next = &next
	}
	previous := map[string][]string{}
	if after != nil || f.ActivityID != "" {
		if previous, err = previousParts(ctx, db, traceID, callRows); err != nil {
			return Page{}, err
		}
	}
	page.Calls = newCalls(callRows, previous)
	page.Parts, err = readParts(ctx, db, callRows)
	return page, err
}

// previousParts returns, by agent, the parts of the last recorded prompt before the first of some calls.
func previousParts(
	ctx context.Context, db postgres.DB, traceID string, callRows []callRow,
) (map[string][]string, error) {
	previous := map[string][]string{}
	if len(callRows) == 0 {
		return previous, nil
	}
	var agents []string
	for _, row := range callRows {
		agents = append(agents, row.Agent)
	}
	slices.Sort(agents)
	rows, err := db.Query(ctx, `
		select caller.agent, prompt.tools as tools_digest, prompt.messages as digests
		  from unnest(@agents::text[]) caller (agent)
		 cross join lateral (
		       select p.tools, p.messages
		         from agent_activity a
		         join agent_prompts p on p.activity_id = a.id
		        where a.trace_id = @trace_id and a.kind = 'model' and a.agent = caller.agent and a.id < @first::text::uuid
		        order by a.id desc
		        limit 1) prompt`,
		pgx.QueryExecModeCacheDescribe,
		postgres.Strict{"trace_id": traceID, "agents": slices.Compact(agents), "first": callRows[0].ActivityID})
	found, err := postgres.Collect(rows, err, "read earlier calls", pgx.RowToStructByNameLax[callRow])
	for _, row := range found {
		previous[row.Agent] = row.hexDigests()
	}
	return previous, err
}

// hexDigests returns the digests of a call in hex, the tools first.
func (row callRow) hexDigests() (list []string) {
	if row.ToolsDigest != nil {
		list = append(list, hex.EncodeToString(row.ToolsDigest))
	}
	for _, d := range row.Digests {
		list = append(list, hex.EncodeToString(d))
	}
	return list
}

// findTrace returns the stored form of a trace's id.
func findTrace(ctx context.Context, db postgres.DB, anyForm string) (string, error) {
	ids, err := trace.ParseAny(anyForm)
	if err != nil {
		return "", err
	}
	forms := make([]string, len(ids))
	for i, id := range ids {
		forms[i] = string(id)
	}
	found, err := postgres.Values[string](ctx, db, "find trace", `
		select form.id
		  from unnest(@ids::text[]) form (id)
		 where exists (select from agent_executions e where e.trace_id = form.id)
		    or exists (select from agent_activity a where a.trace_id = form.id)
		 limit 1`, postgres.Strict{"ids": forms})
	if err == nil && len(found) == 0 {
		err = activity.ErrNotFound
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// newCalls converts rows to calls. It counts the parts that each call shares with the previous call of its agent.
func newCalls(callRows []callRow, previous map[string][]string) []Call {
	list := make([]Call, len(callRows))
	for i, row := range callRows {
		c, digests := row.Call, row.hexDigests()
		c.CreatedAt = c.CreatedAt.UTC()
		c.Messages = append([]string{}, digests...)
		if row.ToolsDigest != nil {
			c.Tools, c.Messages = &digests[0], c.Messages[1:]
		}
		prevParts := previous[c.Agent]
		for c.SharedParts < min(len(digests), len(prevParts)) && digests[c.SharedParts] == prevParts[c.SharedParts] {
			c.SharedParts++
		}
		if c.Recorded {
			previous[c.Agent] = digests
		}
		list[i] = c
	}
	return list
}

// readParts reads the parts of a page's calls.
func readParts(ctx context.Context, db postgres.DB, callRows []callRow) (map[string]Part, error) {
	var digests [][]byte
	for _, row := range callRows {
		digests = slices.Concat(digests, row.Digests)
		if row.ToolsDigest != nil {
			digests = append(digests, row.ToolsDigest)
		}
	}
	rows, err := db.Query(ctx, `
		select encode(p.digest, 'hex'), p.body, p.truncated, p.used_on::text
		  from agent_prompt_parts p where p.digest = any (@digests)`,
		postgres.Strict{"digests": digests})
	if err != nil {
		return nil, err
	}
	found := map[string]Part{}
	var key, body string
	var p Part
	_, err = pgx.ForEachRow(rows, []any{&key, &body, &p.Truncated, &p.UsedOn}, func() error {
		p.Body, p.Bytes = asJSON(body), len(body)
		p.Role = roleOf(p.Body)
		found[key] = p
		return nil
	})
	return found, err
}

// asJSON returns a body as JSON, and other text as a JSON string.
func asJSON(body string) json.RawMessage {
	if json.Valid([]byte(body)) {
		return json.RawMessage(body)
	}
	return redact.JSON(body, MaxPart)
}

// roleOf returns the role of a message; empty for the tools.
func roleOf(body json.RawMessage) string {
	var m struct {
		Role string `json:"role"`
	}
	if json.Unmarshal(body, &m) != nil {
		return ""
	}
	return m.Role
}
