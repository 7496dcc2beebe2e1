package evals_test

import (
	"encoding/json"
	"testing"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/selfheal"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestACaseOfAnOutageAsksWhatTheAgentDoesThen(t *testing.T) {
	t.Parallel()
	failure := selfheal.Failure{ActivityID: "2", TraceID: "ch_x", ErrorClass: "timeout", ErrorMessage: "no answer"}
	story := activity.Trace{TraceID: "ch_x", Activities: []activity.Row{
		{ID: "1", Kind: activity.KindModel, Input: json.RawMessage(`{"messages": [{"role": "user", "content": "Where is 7?"}]}`)},
		{ID: "3", Kind: activity.KindCall, SkillName: "lookup", Status: activity.Success, Output: json.RawMessage(`{"id": 7}`)},
		{ID: "2", Kind: activity.KindCall, SkillName: "track", Status: activity.Error, Input: json.RawMessage(`{"order": 7}`)},
	}}
	asked, err := evals.FromOutage("track", failure, story, "")
	require.NoError(t, err)
	broken := []evals.Stub{{Error: "no answer", Class: "timeout"}}
	assert.NoDiff(t, broken, asked.Skills["track"])
	assert.Truef(t, asked.Name == "track fails: timeout" && asked.Messages[0].User == "Where is 7?" &&
		len(asked.Skills["lookup"]) == 1, "case %+v", asked)
	beat := story
	beat.TraceID = string(trace.New(trace.Heartbeat))
	unasked, err := evals.FromOutage("track", failure, beat, "")
	require.NoError(t, err)
	assert.NoDiff(t, []evals.Message{{User: `Call track with {"order": 7} and say what came of it.`}}, unasked.Messages)
	story.Activities = story.Activities[1:]
	direct, err := evals.FromOutage("track", failure, story, "mine")
	require.NoError(t, err)
	assert.Truef(t, direct.Name == "mine" &&
		direct.Messages[0].User == `Call track with {"order": 7} and say what came of it.`, "case %+v", direct)
	assert.NoDiff(t, broken, direct.Skills["track"])

	d := evals.Definition{Name: evals.OutageSuite, Cases: []evals.Case{asked, direct}}
	require.NoError(t, evals.Validate(d))
	assert.True(t, len(d.Outages("track")) == 2 && len(d.Outages("lookup")) == 0,
		"the cases of a skill are those in which it fails")
	call := evals.Call{Skill: "track", Args: json.RawMessage(`{}`)}
	why := evals.Judge(asked, evals.Observed{Calls: []evals.Call{call, call, call}})
	assert.Truef(t, len(why) == 0, "three calls: %v", why)
	why = evals.Judge(asked, evals.Observed{Calls: []evals.Call{call, call, call, call}})
	assert.Truef(t, len(why) == 1, "four calls: %v", why)
}
