package engineroom

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// caseFromPage makes a case from a trace.
func (room *Room) caseFromPage() page {
	return page{
		path: "/evals/from/{id}", name: "casefrom", open: room.openCaseFrom,
		parts: []part{{name: "case", load: room.caseFrom}},
	}
}

// newCase is a case made from a trace, in the form of a workspace file.
type newCase struct {
	Trace, Suite string
	Suites       []string
	Text         string // YAML of the case, or of a new suite if Suite is empty
	Why          string // the reason why there is no case
}

func (room *Room) openCaseFrom(ctx context.Context, req *pageRequest) (string, error) {
	result, err := room.readCase(ctx, req.path("id"), req.Query.Get("suite"))
	req.Subject = result
	return "A case from a trace", err
}

func (room *Room) caseFrom(_ context.Context, req *pageRequest) (any, error) { return req.Subject, nil }

// readCase makes a case from a trace, for a suite. An unknown suite counts as no suite.
func (room *Room) readCase(ctx context.Context, id, suite string) (newCase, error) {
	result := newCase{Trace: id}
	trace := activity.Trace{TraceID: id}
	rows, err := room.Read.Query(ctx, `
		select a.kind, a.skill_name, a.purpose, a.execution_id::text as execution_id, a.status, a.input, a.output,
		       a.error_message, a.error_class, a.created_at
		  from agent_activity a
		 where a.trace_id = @trace and (a.kind in ('model', 'call') or a.kind = 'phase' and a.skill_name = 'delegate')
		 order by a.created_at, a.id limit @limit + 1`, customPlan, postgres.Strict{"trace": id, "limit": maxCaseCalls})
	trace.Activities, err = postgres.Collect(rows, err, "read trace "+id, pgx.RowToStructByNameLax[activity.Row])
	switch {
	case err != nil:
		return result, err
	case len(trace.Activities) == 0:
		return result, notFound("there is no trace %.60q with model calls", id)
	case len(trace.Activities) > maxCaseCalls:
		result.Why = fmt.Sprintf("the trace has more than %d calls", maxCaseCalls)
		return result, nil
	}
	list, err := evals.List(ctx, room.Read)
	if err != nil {
		return result, err
	}
	for _, s := range list[:min(len(list), maxSuites)] {
		result.Suites = append(result.Suites, s.Name)
	}
	if slices.Contains(result.Suites, suite) {
		result.Suite = suite
	}
	c, err := evals.FromTrace(trace, "")
	if errors.Is(err, evals.ErrNoCase) {
		result.Why = err.Error()
		return result, nil
	}
	if err != nil {
		return result, err
	}
	if result.Text, err = c.YAML(); result.Suite == "" {
		result.Text = "kind: eval\nname: " + newSuiteName + "\ncases:\n" + result.Text
	}
	return result, err
}

// maxCaseCalls bounds the calls of a case. A case of only the first calls would expect the wrong answer.
const maxCaseCalls = 500

// newSuiteName is the name of a new suite.
const newSuiteName = "from-traces"

// Command adds the case in a terminal.
func (c newCase) Command() string { return "agent eval add " + c.Trace + " --to FILE" }

// Download is the address of the text as a file.
func (c newCase) Download() string {
	path := "/evals/from/" + url.PathEscape(c.Trace) + "/case.yaml"
	if c.Suite != "" {
		path += "?suite=" + url.QueryEscape(c.Suite)
	}
	return path
}

// downloadCase serves a case made from a trace as a file.
func (room *Room) downloadCase(w http.ResponseWriter, r *http.Request) {
	result, err := room.readCase(r.Context(), r.PathValue("id"), r.URL.Query().Get("suite"))
	if err == nil && result.Why != "" {
		err = problem.New(http.StatusNotFound, "%s", result.Why)
	}
	if err != nil {
		room.Refuse(w, r, err)
		return
	}
	h := w.Header()
	setSecurityHeaders(h)
	h.Set("Content-Type", "application/yaml; charset=utf-8")
	h.Set("Content-Disposition", `attachment; filename="case.yaml"`)
	h.Set("Cache-Control", "no-store")
	if _, err := strings.NewReader(result.Text).WriteTo(w); err != nil {
		room.Logger.DebugContext(r.Context(), "case not sent", "error", err)
	}
}
