package engineroom

import (
	"net/url"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/trace"
)

// tableLink downloads a listing as CSV from the API.
type tableLink struct {
	Href    string
	Omitted []string // filters of the page that the API lacks
}

// newTableLink returns the link to a route with its nonempty parameters.
func newTableLink(path string, parameters map[string]string, omitted ...string) tableLink {
	q := url.Values{"format": {"csv"}}
	for name, value := range parameters {
		if value != "" {
			q.Set(name, value)
		}
	}
	return tableLink{path + "?" + q.Encode(), omitted}
}

// apiTime formats a time for the API; empty for none.
func apiTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format(time.RFC3339)
}

// Without names the omitted filters.
func (l tableLink) Without() string { return strings.Join(l.Omitted, ", ") }

// Table links to the executions of the filter as a table. The API compares only whole names, and has no excluding
// filters.
func (l executionList) Table() tableLink {
	var left []string
	q := map[string]string{
		"status": l.Status, "surface": l.Surface, "since": apiTime(l.start().Truncate(time.Minute)),
		"until": apiTime(l.Until),
	}
	if l.Failed {
		q["status"] = "failed,timeout"
	}
	switch l.View {
	case "waiting":
		q["status"] = "waiting"
	case "stuck":
		q["status"], left = "waiting", append(left, "stuck")
	}
	for name, value := range map[string]string{"status": q["status"], "surface": l.Surface} {
		if _, excluded := parseExclusion(value); excluded {
			delete(q, name)
			left = append(left, name)
		}
	}
	if flow, excluded := parseExclusion(l.Flow); len(l.flows) == 1 && !excluded {
		q["flow"] = l.flows[0]
	} else if flow != "" {
		left = append(left, "flow")
	}
	if l.Agent != "" {
		left = append(left, "agent")
	}
	q["label"] = l.Label
	if id, err := trace.ParseAny(l.Trace); err == nil && len(id) > 0 {
		q["trace_id"] = l.Trace
	} else if l.Trace != "" {
		left = append(left, "id")
	}
	if l.Kind != "" {
		left = append(left, "waits for")
	}
	return newTableLink("/v1/executions", q, left...)
}

// Table links to the actions of the filter as a table.
func (l auditList) Table() tableLink {
	f := l.Asked
	var left []string
	for _, one := range []struct {
		word string
		set  bool
	}{
		{"skill", f.SkillLike != ""},
		{"agent", f.Agent+f.AgentLike != ""},
		{"lane", f.Lane+f.LaneLike != ""},
		{"status", f.Status != ""},
		{"id", f.TraceIDs != nil},
	} {
		if one.set {
			left = append(left, one.word)
		}
	}
	return newTableLink("/v1/activity/audit", map[string]string{
		"skill": f.Skill, "surface": f.Surface, "trace_id": f.TraceID, "since": apiTime(f.Since), "until": apiTime(f.Until),
	}, left...)
}

// Table links to the spend of the filter as a table: by day, surface and model, and by skill or purpose.
func (f spendFilter) Table() tableLink {
	by, left := "", []string(nil)
	if f.By == "purpose" {
		by = "purpose"
	}
	if f.Purpose != "" {
		by, left = "purpose", append(left, "purpose")
	}
	return newTableLink("/v1/activity/spend", map[string]string{
		"by": by, "skill": f.Skill, "surface": f.Surface, "model": f.Model, "since": apiTime(f.since()),
	}, left...)
}
