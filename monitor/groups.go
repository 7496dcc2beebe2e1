package monitor

import (
	"cmp"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// Group summarizes the failures with one root error.
type Group struct {
	Message  string    `json:"message"` // root error of the newest failure
	Class    string    `json:"class"`
	Runs     int       `json:"runs"`  // failed executions
	Calls    int       `json:"calls"` // failed calls
	Since    time.Time `json:"since"`
	Last     time.Time `json:"last"`
	TraceID  string    `json:"trace_id"` // trace of the newest failure
	Subjects []Subject `json:"subjects"`
	Failing  bool      `json:"-"` // a subject still fails
	// Retry has the newest executions that can be retried, at most MaxRetry, the newest first. It omits children of failed
	// executions and executions with a fork.
	Retry []string `json:"-"`
}

// MaxRetry bounds the executions of a group that can be retried together.
const MaxRetry = 200

// Groups groups the failures of the agents that concerns accepts by root error: groups with a failing subject first,
// then by the newest failure. unforkable has the flows whose executions cannot be retried.
func (f Failures) Groups(concerns func(string) bool, unforkable map[string]string) []Group {
	roots := f.roots()
	byKey, keys := map[string]*Group{}, []string{}
	failed := map[string]bool{}
	for _, item := range f.list {
		failed[item.ID] = true
	}
	for _, item := range f.list {
		if !concerns(item.Agent) {
			continue
		}
		root := redact.Text(roots[item.ID], maxRedacted)
		key := errorKey(root)
		g := byKey[key]
		if g == nil {
			g = &Group{Since: item.At}
			byKey[key], keys = g, append(keys, key)
		}
		g.add(item, root, f.outcomeOf(item).Failing())
		if item.Kind == "flow" && !item.Retried && !failed[item.Parent] && unforkable[item.Name] == "" {
			g.Retry = append(g.Retry, item.ID)
		}
	}
	list := make([]Group, 0, len(keys))
	for _, key := range keys {
		g := byKey[key]
		slices.SortFunc(g.Retry, func(a, b string) int { return strings.Compare(b, a) }) // ids are in the order of time
		g.Retry = g.Retry[:min(len(g.Retry), MaxRetry)]
		list = append(list, *g)
	}
	slices.SortStableFunc(list, func(a, b Group) int {
		if a.Failing != b.Failing {
			if a.Failing {
				return -1
			}
			return 1
		}
		return b.Last.Compare(a.Last)
	})
	return list
}

func (g *Group) add(f failure, root string, failing bool) {
	if f.Kind == "flow" {
		g.Runs++
	} else {
		g.Calls++
	}
	if f.At.Before(g.Since) {
		g.Since = f.At
	}
	if !f.At.Before(g.Last) {
		g.Last, g.TraceID, g.Message = f.At, f.TraceID, root
	}
	g.Class = cmp.Or(g.Class, f.Class)
	g.Failing = g.Failing || failing
	subject := Subject{f.Kind, f.Name, SubjectURL(f.Kind, f.Name)}
	if !slices.Contains(g.Subjects, subject) {
		g.Subjects = append(g.Subjects, subject)
	}
}

// Named returns the first subjects.
func (g Group) Named() []Subject { return g.Subjects[:min(len(g.Subjects), maxSubjects)] }

// More returns the number of subjects that [Group.Named] omits.
func (g Group) More() int { return max(len(g.Subjects)-maxSubjects, 0) }

// maxSubjects bounds the named subjects of a group, and maxRedacted the length of a redacted message.
const maxSubjects, maxRedacted = 4, 8192

// Subject is a failed flow, skill, action or model.
type Subject struct {
	Kind string `json:"kind"` // flow, skill, action or model
	Name string `json:"name"`
	URL  string `json:"link"`
}

// SubjectURL returns the page of a failed subject.
func SubjectURL(kind, name string) string {
	switch kind {
	case "flow":
		return "/executions?failed=1&flow=" + url.QueryEscape(name)
	case "skill":
		return "/skills/" + url.PathEscape(name)
	}
	return "/activity?status=error&skill=" + url.QueryEscape(name)
}

// roots returns the root error of each failure by id. Like the page of a trace, it uses activity.FindRootCause: for a
// failed execution, its failed children, and the last error inside each.
func (f Failures) roots() map[string]string {
	children, ids := map[string][]failure{}, map[string]bool{}
	for _, item := range f.list {
		ids[item.ID] = true
	}
	var topLevel []failure
	for _, item := range f.list {
		if ids[item.Parent] {
			children[item.Parent] = append(children[item.Parent], item)
		} else {
			topLevel = append(topLevel, item)
		}
	}
	roots := make(map[string]string, len(f.list))
	for _, top := range topLevel {
		roots[top.ID] = top.Message
		if top.Kind != "flow" {
			continue
		}
		tree, spans := []failure{top}, []activity.FailedSpan{}
		for i := 0; i < len(tree); i++ {
			item := tree[i]
			tree = append(tree, children[item.ID]...)
			spans = append(spans, activity.FailedSpan{
				ID: item.ID, ExecutionID: item.ID, IsExecution: true, IsRoot: i == 0, ParentID: item.Parent,
				Name: item.Name, Step: item.Step, Status: "failed", Message: item.Message, At: item.At,
			})
			if item.InnerMessage != "" {
				spans = append(spans, activity.FailedSpan{
					ID: item.ID + " call", ExecutionID: item.ID, Name: item.InnerName, Step: item.InnerStep, Status: "error",
					Class: item.Class, Message: item.InnerMessage, At: item.At,
				})
			}
		}
		if cause := activity.FindRootCause(spans); cause != nil {
			for _, item := range tree {
				roots[item.ID] = cause.Message
			}
		}
	}
	return roots
}

// variableRegexp matches the parts of a message that differ between failures: ids, hexadecimal and decimal numbers.
var variableRegexp = regexp.MustCompile(
	`(?i)\b(?:[a-z]{2}_[0-9a-z]{26}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|0x[0-9a-f]+|[0-9a-f]*[0-9][0-9a-f]{7,})\b|[0-9]+`)

// errorKey returns a message without its variable parts.
func errorKey(message string) string {
	return variableRegexp.ReplaceAllString(strings.Join(strings.Fields(strings.ToLower(message)), " "), "#")
}
