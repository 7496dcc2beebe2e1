package engineroom

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// scope returns the scope that a page's viewer needs.
func (p page) scope() principals.Scope {
	first, _, _ := strings.Cut(strings.TrimPrefix(p.path, "/"), "/")
	if strings.HasPrefix(p.path, "/evals/from/") || first == "evals" && strings.Contains(p.path, "/cases/") ||
		first == "traces" && strings.HasSuffix(p.path, "/prompts") { // this page shows texts of threads
		return principals.ThreadsRead
	}
	switch first {
	case "threads", "memory", "find", "channels":
		return principals.ThreadsRead
	case "operate":
		return principals.Operate
	case "approvals":
		return principals.ApprovalsRead
	case "principals":
		return principals.Administer
	}
	return principals.RunsRead
}

// mayView rejects a view that needs more than the page's scope. For example, the prompts of a trace are texts of
// threads.
func mayView(r *http.Request) error {
	principal := principals.From(r.Context())
	if principal == nil || r.URL.Query().Get("tab") != "prompt" || principal.May(principals.ThreadsRead) {
		return nil
	}
	return problem.New(http.StatusForbidden, "this needs the scope %s, which %s (role %s) does not have",
		principals.ThreadsRead, principal.Name, principal.Role).Kind("missing-scope", "Missing scope")
}

// MayOpen reports whether the viewer may open a page.
func (d pageData) MayOpen(p page) bool { return d.Viewer == nil || d.Viewer.May(p.scope()) }

// Scopes lists the scopes of the viewer. The stylesheet hides forms that need other scopes.
func (d pageData) Scopes() string {
	if d.Viewer == nil {
		return strings.Join((&principals.Caller{
			Principal: principals.Principal{Role: principals.Admin},
			Scopes:    []string{"*"},
		}).Effective(), " ")
	}
	return strings.Join(d.Viewer.Effective(), " ")
}

// linkedScopes are the scopes of pages that other pages link to. Only pages of principals link to pages of principals.
var linkedScopes = []principals.Scope{
	principals.RunsRead, principals.ThreadsRead, principals.Operate, principals.ApprovalsRead,
}

// mayOpen reports whether the viewer may open the page or route of an address.
func (req *pageRequest) mayOpen(address string) bool {
	target, err := url.Parse(address)
	if err != nil || target.Query().Get("tab") == "prompt" && !req.mayReadThreads {
		return false
	}
	required := page{path: strings.TrimPrefix(target.Path, "/v1")}.scope()
	return target.Path == "" || !strings.Contains(req.missingScopes, string(required))
}

// unlink removes the href of links that the viewer may not open, so they become text. It finds the end of a tag at the
// first >, because templates escape > in attributes.
func (req *pageRequest) unlink(body []byte) []byte {
	if req.missingScopes == "" {
		return body
	}
	result := make([]byte, 0, len(body))
	for {
		text, rest, found := bytes.Cut(body, []byte("<a "))
		if result = append(result, text...); !found {
			return result
		}
		tag, rest, _ := bytes.Cut(rest, []byte(">"))
		before, value, ok := bytes.Cut(tag, []byte(`href="`))
		address, after, _ := bytes.Cut(value, []byte(`"`))
		if ok && !req.mayOpen(html.UnescapeString(string(address))) {
			tag = slices.Concat(before, after)
		}
		result = append(append(append(result, "<a "...), tag...), '>')
		body = rest
	}
}

// read loads the part. Package activity decides which texts to hide from a viewer who may not read threads.
func (p part) read(ctx context.Context, req *pageRequest) (any, error) {
	if !req.mayReadThreads {
		ctx = activity.WithoutTexts(ctx)
	}
	return p.load(ctx, req)
}

// hidesTextsOf reports whether ctx hides the texts of an execution.
func (room *Room) hidesTextsOf(ctx context.Context, id string) (bool, error) {
	if !activity.HidesTexts(ctx) {
		return false, nil
	}
	var flow, surface string
	var thread *string
	err := room.Read.QueryRow(ctx, `select e.flow, e.surface, e.thread_id from agent_executions e where e.id = @id`,
		postgres.Strict{"id": id}).Scan(&flow, &surface, &thread)
	if errors.Is(err, pgx.ErrNoRows) {
		return true, nil
	}
	if err != nil {
		return true, fmt.Errorf("read whether the execution has texts: %w", err)
	}
	return activity.IsConversation(flow, surface, thread), nil
}

// hideJSON replaces JSON and its size by the note, if hide is set.
func hideJSON(hide bool, text *string, size *int64) {
	if hide {
		*text = string(activity.HiddenJSON(json.RawMessage(*text)))
		*size = int64(len(*text))
	}
}

// hideResult replaces the result of an execution by the note, if ctx hides its texts.
func hideResult(ctx context.Context, result *string, flow, surface string, thread *string) {
	if *result != "" && activity.HidesTexts(ctx) && activity.IsConversation(flow, surface, thread) {
		*result = activity.HiddenText
	}
}
