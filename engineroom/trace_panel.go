package engineroom

import (
	"context"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	reasons "github.com/lanekeeper/lanekeeper/why"
)

// panelTabs are the tabs of the panel. The first tab is the default.
var panelTabs = []string{"details", "why", "prompt", "cost", "raw"}

// spanPanel is the panel beside the spans: of one span, or of the trace as a whole.
type spanPanel struct {
	ID, Span, Tab string
	Query         url.Values
	path          string

	Head    *traceHead // of the trace as a whole
	Related traceRelated
	Row     *spanRow
	Run     *traceRun
	Wait    *spanWait
	Lost    []lostClaim
	Node    *spanNode // of the span; nil for the trace, or an unknown span
	Cause   *activity.RootCause

	Why       []whyPart
	Prompt    *promptView
	Costs     []costLine
	MoreCosts bool
	Sum       costLine // of all lines, also those that Costs lacks
	Raw       shownValue
}

// tracePanel loads the panel. It reads only the open tab.
func (room *Room) tracePanel(ctx context.Context, req *pageRequest) (any, error) {
	t, _ := req.Subject.(*traceSubject)
	p := &spanPanel{ID: t.ID, Span: t.Span, Tab: t.Tab, Query: req.Query, path: req.withParam("tab", "")}
	if err := room.findSpan(ctx, t, p); err != nil {
		return nil, err
	}
	if tabs := p.Tabs(); !slices.Contains(tabs, p.Tab) {
		p.Tab = tabs[0]
	}
	var err error
	switch {
	case p.Span != "" && p.Node == nil: // an unknown span has no content
	case p.Tab == "details" && p.Row != nil:
		err = room.addApproval(ctx, p.Row)
	case p.Tab == "why":
		err = room.panelWhy(ctx, p)
	case p.Tab == "prompt":
		p.Prompt, err = room.promptOf(ctx, p.ID, p.Row)
	case p.Tab == "cost":
		err = room.panelCosts(ctx, p)
	case p.Tab == "raw":
		err = room.panelRaw(ctx, p)
	}
	return p, err
}

// Tabs returns the tabs of this panel.
func (p *spanPanel) Tabs() []string {
	switch {
	case p.Row != nil && p.Row.Kind == "model":
		return panelTabs
	case p.Wait != nil:
		return []string{"details", "why"}
	}
	return []string{"details", "why", "cost", "raw"}
}

// Found reports whether the panel has content.
func (p *spanPanel) Found() bool { return p.Span == "" || p.Node != nil }

// TabURL is the address of a tab.
func (p *spanPanel) TabURL(tab string) string {
	return (&pageRequest{URL: p.path, Query: p.Query}).withParam("tab", strings.TrimPrefix(tab, panelTabs[0])) + "#panel"
}

// CloseURL is the address of the trace as a whole.
func (p *spanPanel) CloseURL() string {
	query := url.Values{}
	for name, values := range p.Query {
		if name != "tab" {
			query[name] = values
		}
	}
	return (&pageRequest{URL: p.path, Query: query}).withParam("span", "")
}

// SpanURL is the address of another span of the trace.
func (p *spanPanel) SpanURL(span string) string {
	return "/traces/" + p.ID + "?span=" + url.QueryEscape(span) + "#panel"
}

// TabLabel is the label of a tab.
func (p *spanPanel) TabLabel(tab string) string {
	return map[string]string{
		"details": "Details", "why": "Why", "prompt": "Prompt", "cost": "Cost",
		"raw": "Raw JSON",
	}[tab]
}

// findSpan finds the panel's span.
func (room *Room) findSpan(ctx context.Context, t *traceSubject, p *spanPanel) (err error) {
	if p.Span == "" {
		if p.Head = t.head(); p.Head == nil {
			p.Head, err = room.readHead(ctx, p.ID, false)
		}
		if err == nil && (p.Tab == "" || p.Tab == panelTabs[0]) {
			p.Related, err = room.readRelated(ctx, p.Head)
		}
		return err
	}
	if uuidPattern.MatchString(p.Span) {
		rows, err := room.rowOf(ctx, p.ID, p.Span)
		if err != nil {
			return err
		}
		if len(rows) > 0 {
			p.Row = &rows[0]
			p.Node = rowNode(p.Row)
		}
	}
	runs, _, err := room.runsOf(ctx, p.ID)
	if err != nil {
		return err
	}
	if p.Lost, err = room.readLostClaims(ctx, runs); err != nil {
		return err
	}
	switch {
	case p.Row != nil:
		markLost([]*spanNode{p.Node}, runs, p.Lost)
		if p.Node.Failed() || p.Node.Halted() {
			p.Cause, err = activity.RootCauseOf(ctx, room.Read, p.ID)
		}
		return err
	case strings.HasPrefix(p.Span, "wait-"):
		waits, err := room.waitsOf(ctx, runs)
		for i := range waits {
			if waits[i].elementID() == p.Span {
				p.Wait, p.Node = &waits[i], waitNode(&waits[i])
			}
		}
		return err
	}
	i := slices.IndexFunc(runs, func(r traceRun) bool { return r.ID == p.Span })
	if i < 0 {
		return nil
	}
	p.Node = nodesOf(nil, runs[i:i+1], nil)[0]
	p.Run = p.Node.Run
	p.Lost = slices.DeleteFunc(p.Lost, func(l lostClaim) bool { return l.ExecutionID != p.Span })
	if p.Node.Failed() {
		p.Cause, err = activity.RootCauseOf(ctx, room.Read, p.ID)
	}
	return err
}

// IsCause reports whether the span is the root cause.
func (p *spanPanel) IsCause() bool { return p.Cause != nil && p.Cause.ID == p.Span }

// whyPart is a part of the reasons of a trace.
type whyPart struct {
	Title string
	Rows  []whyRow
}

// whyRow is a reason with its links.
type whyRow struct {
	reasons.Reason
	Depth int
	Links []whyLink
}

type whyLink struct{ Label, URL string }

// panelWhy reads the reasons of the trace, or the reasons about the span's execution.
func (room *Room) panelWhy(ctx context.Context, p *spanPanel) error {
	answer, err := reasons.Of(ctx, room.Read, p.ID)
	if err != nil {
		return err
	}
	run := ""
	switch {
	case p.Run != nil:
		run = p.Run.ID
	case p.Wait != nil:
		run = p.Wait.ExecutionID
	case p.Row != nil:
		run = postgres.Deref(p.Row.ExecutionID)
	}
	for _, of := range answer.Parts() {
		part, depths := whyPart{Title: of.Title()}, answer.Depths(of)
		for i, r := range answer.Of(of) {
			if p.Span == "" || run != "" && strings.Contains(r.FromRef+" "+r.ToRef+" "+postgres.Deref(r.ExecutionID), run) {
				part.Rows = append(part.Rows, whyRow{Reason: r, Depth: depths[i], Links: whyLinks(p.ID, r)})
			}
		}
		if len(part.Rows) > 0 {
			p.Why = append(p.Why, part)
		}
	}
	return nil
}

// costLine sums up model calls of one model and purpose.
type costLine struct {
	Model, Purpose                                     string
	Calls, Prompt, Cached, CacheWrites, Output, Tokens int64
	CostUSD                                            float64
}

// Name is the purpose of the calls.
func (c costLine) Name() string { return modelName(c.Purpose, "") }

// maxCosts bounds the lines of costs.
const maxCosts = 50

// panelCosts sums up the model calls of the trace, or the model calls within the span.
func (room *Room) panelCosts(ctx context.Context, p *spanPanel) (err error) {
	run, step, row := "", "", ""
	switch {
	case p.Run != nil:
		run = p.Run.ID
	case p.Row != nil && p.Row.Kind == "phase" && p.Row.ExecutionID != nil && p.Row.Step != "":
		run, step = *p.Row.ExecutionID, p.Row.Step
	case p.Row != nil:
		row = p.Row.ID
	}
	p.Costs, err = postgres.Rows[costLine](ctx, room.Read, "sum costs of trace", `
		select left(a.model, 200) as model, left(a.purpose, 200) as purpose, count(*) as calls,
		       sum(lanekeeper.agent_tokens(a.token_usage, 'prompt_tokens'))::bigint as prompt,
		       sum(lanekeeper.agent_tokens(a.token_usage, 'cached_tokens'))::bigint as cached,
		       sum(lanekeeper.agent_tokens(a.token_usage, 'cache_write_tokens'))::bigint as cache_writes,
		       sum(lanekeeper.agent_tokens(a.token_usage, 'completion_tokens'))::bigint as output,
		       sum(lanekeeper.agent_tokens(a.token_usage, 'total_tokens'))::bigint as tokens,
		       sum(a.cost_usd)::float8 as cost_usd
		  from (select x.id, x.kind, x.execution_id, x.step, x.model, x.purpose, x.token_usage, x.cost_usd
		          from agent_activity x where x.trace_id = @id order by x.created_at limit @scan) a
		 where a.kind = 'model' and (@run::text = '' or a.execution_id = nullif(@run::text, '')::uuid)
		   and (@step::text = '' or starts_with(a.step, @step::text || '/'))
		   and (@row::text = '' or a.id = nullif(@row::text, '')::uuid)
		 group by 1, 2 order by 9 desc, 8 desc, 1, 2`, customPlan, postgres.Strict{
		"id": p.ID, "scan": traceSummed, "run": run, "step": step, "row": row,
	})
	for _, c := range p.Costs {
		p.Sum.Calls, p.Sum.Prompt, p.Sum.Cached, p.Sum.CacheWrites = p.Sum.Calls+c.Calls, p.Sum.Prompt+c.Prompt,
			p.Sum.Cached+c.Cached, p.Sum.CacheWrites+c.CacheWrites
		p.Sum.Output, p.Sum.Tokens, p.Sum.CostUSD = p.Sum.Output+c.Output, p.Sum.Tokens+c.Tokens, p.Sum.CostUSD+c.CostUSD
	}
	p.Costs, p.MoreCosts = firstN(p.Costs, maxCosts)
	return err
}

// panelRaw reads the span as JSON: an execution in the form of the HTTP API, or the columns of an activity.
func (room *Room) panelRaw(ctx context.Context, p *spanPanel) error {
	switch {
	case p.Run != nil:
		x, err := executions.Get(ctx, room.Read, p.Run.ID)
		if err != nil {
			return err
		}
		raw, err := json.Marshal(x.Redacted(ctx))
		if err != nil {
			return fmt.Errorf("show execution: %w", err)
		}
		p.Raw = rawValue(string(raw), int64(len(raw)))
	case p.Row != nil:
		hidden := "{}"
		if activity.HidesTexts(ctx) && activity.HasTexts(activity.Kind(p.Row.Kind), p.Row.Skill) {
			hidden = fmt.Sprintf(`{"input":{"note":%[1]q},"output":{"note":%[1]q}}`, activity.HiddenText)
		}
		rows, err := room.Read.Query(ctx, `
			select left(j.text, @limit::int), octet_length(j.text) from (
			  select ((to_jsonb(a) - 'conversation_id') || @hidden::text::jsonb)::text as text from agent_activity a
			   where a.id = @row::text::uuid and a.trace_id = @id) j`,
			customPlan, postgres.Strict{"id": p.ID, "row": p.Row.ID, "limit": maxSpanText, "hidden": hidden})
		var body string
		var size int64
		if err == nil {
			_, err = pgx.ForEachRow(rows, []any{&body, &size}, func() error { return nil })
		}
		if err != nil {
			return fmt.Errorf("read activity as JSON: %w", err)
		}
		p.Raw = rawValue(body, size)
	}
	return nil
}

// rawValue formats JSON, up to the maxSpanText characters that the query read.
func rawValue(body string, size int64) shownValue {
	if int64(len(body)) < size || utf8.RuneCountInString(body) > maxSpanText {
		return shownValue{Text: cut(maxSpanText, body), Bytes: size}
	}
	return shownValue{Text: formatJSON(body), Bytes: size, Whole: true}
}

// Began is the start of the span, for the head of the panel.
func (p *spanPanel) Began() time.Time { return p.Node.From }

// Trouble reports a row about a failure.
func (r whyRow) Trouble() bool { return r.Part == reasons.Trouble && r.Kind != reasons.More }

// whyLinks returns the links of a reason: to another trace, if it belongs to one, and to the pages of its objects.
func whyLinks(trace string, r reasons.Reason) []whyLink {
	var links []whyLink
	if r.TraceID != trace && r.Kind != reasons.More {
		links = append(links, whyLink{"trace " + r.TraceID, "/traces/" + url.PathEscape(r.TraceID)})
	}
	for _, ref := range []string{r.FromRef, r.ToRef} {
		word, id, _ := strings.Cut(ref, " ")
		pages := map[string]string{
			"execution": "/executions/", "approval": "/approvals/", "delivery": "/deliveries/", "outgoing": "/outgoing/",
			"thread": "/threads/",
		}
		at, ok := pages[word]
		if !ok || id == "" {
			continue
		}
		if word != "thread" {
			id = strings.TrimSpace(id)
			links = append(links, whyLink{word + " " + short(id), at + url.PathEscape(id)})
			continue
		}
		links = append(links, whyLink{"thread " + cut(40, id), at + url.PathEscape(id)})
	}
	return links
}
