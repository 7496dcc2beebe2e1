package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// shownState is what the three commands answer, as far as the tests look at it.
type shownState struct {
	Changed   bool
	Objective struct {
		Status, DecidedBy string
		Done              int
		Steps             []struct{ ID, Status string }
		Evidence          []struct {
			GivenBy string `json:"given_by"`
			Reason  string
		}
	}
	Automation struct {
		Enabled  bool
		NextRuns []string `json:"next_runs"`
	}
	Run struct{ ID, Status, Cause string }
}

func TestAnAdminGivesDecidesAndConfirms(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	p.must("objectives", "add", "tidy", "--goal", "be tidy", "--success", "no dust", "--step", "sweep")
	var got shownState
	p.mustJSON(&got, "objectives", "pause", "tidy")
	if !got.Changed || got.Objective.Status != "paused" {
		t.Errorf("got %+v", got)
	}
	p.must("objectives", "resume", "tidy")
	var shown struct{ Steps []struct{ ID string } }
	p.mustJSON(&shown, "objectives", "show", "tidy")
	if bad := p.run("objectives", "done", shown.Steps[0].ID); bad.code != exitUsage || !strings.Contains(bad.err, "--reason") {
		t.Errorf("done without a reason: %+v", bad)
	}
	if bad := p.run("objectives", "done", "01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d", "--reason", "I saw it"); bad.code != exitFailed || !strings.Contains(bad.err, "step not found") {
		t.Errorf("done of a step that is not there: %+v", bad)
	}
	p.must("objectives", "done", shown.Steps[0].ID, "--reason", "I saw it")
	contains(t, p.must("objectives", "done", shown.Steps[0].ID, "--reason", "I saw it"), "not pending any more")
	contains(t, p.must("objectives", "show", "tidy"), "completed", "admin's word: I saw it", "no dust", "1 of 1 steps (100 %)")
	if bad := p.run("objectives", "accept", "nothing"); bad.code != exitFailed || !strings.Contains(bad.err, "agent objectives ls") {
		t.Errorf("got %+v", bad)
	}
	contains(t, p.must("activity", "ls"), "add_objective", "confirm_step", "pause_objective")
}

func TestAProposalIsDecidedFromTheCommandLine(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	p.must("skills", "call", "objective_propose", "--args", `{"name":"wish","goal":"g"}`)
	p.must("skills", "call", "automation_propose", "--args", `{"name":"watch","cron":"0 9 * * 1-5","timezone":"Europe/Madrid","skill":"recent_activity"}`)
	contains(t, p.must("objectives", "ls", "--status", "proposed"), "wish")
	contains(t, p.must("automations", "ls"), "watch", "proposed")
	if bad := p.run("automations", "enable", "watch"); bad.code != exitFailed || !strings.Contains(bad.err, "accept") {
		t.Errorf("a proposal was enabled: %+v", bad)
	}
	var got shownState
	p.mustJSON(&got, "objectives", "accept", "wish", "--reason", "good")
	if got.Objective.Status != "active" {
		t.Errorf("got %+v", got)
	}
	p.mustJSON(&got, "automations", "accept", "watch")
	if !got.Automation.Enabled || len(got.Automation.NextRuns) != 3 {
		t.Errorf("got %+v", got)
	}
	contains(t, p.must("automations", "show", "watch"), "0 9 * * 1-5 Europe/Madrid", "it has not run yet", "CE")
	p.mustJSON(&got, "automations", "run", "watch")
	if got.Run.Status != "success" || got.Run.Cause != "manual" {
		t.Errorf("got %+v", got)
	}
	contains(t, p.must("automations", "show", "watch"), "result of ")
	contains(t, p.must("automations", "runs", "watch"), "manual", "success")
	contains(t, p.must("automations", "dead"), "the dead letter box is empty")
	contains(t, p.must("automations", "disable", "watch"), "disabled by admin")
}

func TestTheMemoryFromTheCommandLine(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	p := on(t, url)
	p.must("memory", "set", "contact", `{"name": "Ana"}`, "--category", "admin", "--expires", "720h")
	p.must("memory", "set", "plain", "just words")
	contains(t, p.must("memory", "ls"), "contact", "just words")
	contains(t, p.must("memory", "search", "ana"), "contact")
	contains(t, p.must("memory", "get", "contact", "--category", "admin"), "name: Ana", "revision 1")
	contains(t, p.must("memory", "stats"), "admin", "general")
	for _, refused := range [][]string{
		{"memory", "set", "plain", "x", "--if-revision", "7"}, {"memory", "set", "api_key", "hunter2"}, {"memory", "get", "nothing"},
	} {
		if got := p.run(refused...); got.code != exitFailed || strings.Contains(got.err, "hunter2") {
			t.Errorf("%v: %+v", refused, got)
		}
	}
	for _, wrong := range [][]string{
		{"", "x"}, {"plain", "x", "--category", " "}, {"plain", "x", "--expires", "-1s"}, {"plain", strings.Repeat("x", 70000)},
	} {
		if got := p.run(append([]string{"memory", "set"}, wrong...)...); got.code != exitUsage || !strings.Contains(got.err, "see agent memory set --help") {
			t.Errorf("memory set %.40q: %+v", wrong, got)
		}
	}
	contains(t, p.must("memory", "forget", "plain"), "forgotten")
	contains(t, p.must("memory", "forget", "plain"), "was not remembered")
}
