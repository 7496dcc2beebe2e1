package api_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/retention"
)

func TestHowLongIsKeptIsSetAndAudited(t *testing.T) {
	t.Parallel()
	a := start(t)
	var list struct{ Items []retention.Policy }
	keep := func() map[string]string {
		a.get("/v1/retention", &list)
		all := map[string]string{}
		for _, p := range list.Items {
			all[p.Kind] = p.Keep
		}
		return all
	}
	if got := keep(); len(got) != 11 || got["activity"] != "forever" || got["deliveries"] != "90 days" {
		t.Errorf("at first: %v", got)
	}
	var change retention.Change
	header := a.expect(a.raw("PUT", "/v1/retention", `{"keep":{"activity":"90d","events":"36 hours"},"reason":"the disk is small"}`, asAdmin()),
		"PUT", "/v1/retention", 200, &change)
	if !change.Changed || header.Get("X-Trace-Id") != change.TraceID {
		t.Errorf("%+v, %v", change, header)
	}
	a.audited(change.TraceID, change.ActivityID, "set_retention", "the disk is small")
	if got := keep(); got["activity"] != "90 days" || got["events"] != "36:00:00" || got["messages"] != "forever" {
		t.Errorf("then: %v", got)
	}
	for body, says := range map[string]string{
		`{"reason":"why"}`: "keep is missing", `{"keep":{"activity":"90d"}}`: "reason is missing",
		`{"keep":{"memory":"90d"},"reason":"why"}`:                  "'memory' is not a kind of what is kept",
		`{"keep":{"messages":"90d","events":"1s"},"reason":"why"}`:  "events cannot be kept for 00:00:01: give 1 day to 100 years, or forever",
		`{"keep":{"messages":"a while"},"reason":"why"}`:            "'a while' is not a time to keep messages",
		`{"keep":{"activity":90},"reason":"why"}`:                   "keep",
		`{"keep":{"activity":"90d"},"reason":"why","forever":true}`: "forever",
	} {
		a.refused(a.raw("PUT", "/v1/retention", body, asAdmin()), 400, says)
	}
	if got := keep(); got["messages"] != "forever" {
		t.Errorf("part of what was refused was done: %v", got)
	}
}
