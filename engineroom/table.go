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
	var omitted []string
	q := map[string]string{
		"status": l.Status, "surface": l.Surface, "until": apiTime(l.Until),
		// A period that ends now begins later at each refresh. With its exact start, each refresh would change the page.
		"since": apiTime(l.start().Truncate(time.Minute)),
	}
	if l.Failed {
		q["status"] = "failed,timeout"
	}
	switch l.View {
	case "waiting":
		q["status"] = "waiting"
	case "stuck":
		q["status"], omitted = "waiting", append(omitted, "stuck")
	}
	for name, value := range map[string]string{"status": q["status"], "surface": l.Surface} {
		if _, excluded := parseExclusion(value); excluded {
			delete(q, name)
			omitted = append(omitted, name)
		}
	}
	if flow, excluded := parseExclusion(l.Flow); len(l.flows) == 1 && !excluded {
		q["flow"] = l.flows[0]
	} else if flow != "" {
		omitted = append(omitted, "flow")
	}
	if l.Agent != "" {
		omitted = append(omitted, "agent")
	}
	q["label"] = l.Label
	if id, err := trace.ParseAny(l.Trace); err == nil && len(id) > 0 {
		q["trace_id"] = l.Trace
	} else if l.Trace != "" {
		omitted = append(omitted, "id")
	}
	if l.Kind != "" {
		omitted = append(omitted, "waits for")
	}
	return newTableLink("/v1/executions", q, omitted...)
}

// Table links to the actions of the filter as a table.
func (l auditList) Table() tableLink {
	f := l.Asked
	var omitted []string
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
			omitted = append(omitted, one.word)
		}
	}
	return newTableLink("/v1/activity/audit", map[string]string{
		"skill": f.Skill, "surface": f.Surface, "trace_id": f.TraceID, "since": apiTime(f.Since), "until": apiTime(f.Until),
	}, omitted...)
}

// Table links to the spend of the filter as a table: by day, surface and model, and by skill or purpose.
func (f spendFilter) Table() tableLink {
	dimension, omitted := "", []string(nil)
	if f.By == "purpose" {
		dimension = "purpose"
	}
	if f.Purpose != "" {
		dimension, omitted = "purpose", append(omitted, "purpose")
	}
	return newTableLink("/v1/activity/spend", map[string]string{
		"by": dimension, "skill": f.Skill, "surface": f.Surface, "model": f.Model, "since": apiTime(f.since()),
	}, omitted...)
}
