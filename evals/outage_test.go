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

func TestFromOutage(t *testing.T) {
	t.Parallel()
	failure := selfheal.Failure{ActivityID: "2", TraceID: "ch_x", ErrorClass: "timeout", ErrorMessage: "no answer"}
	turn := activity.Trace{TraceID: "ch_x", Activities: []activity.Row{
		{ID: "1", Kind: activity.KindModel, Input: json.RawMessage(`{"messages": [{"role": "user", "content": "Where is 7?"}]}`)},
		{ID: "3", Kind: activity.KindCall, SkillName: "lookup", Status: activity.Success, Output: json.RawMessage(`{"id": 7}`)},
		{ID: "2", Kind: activity.KindCall, SkillName: "track", Status: activity.Error, Input: json.RawMessage(`{"order": 7}`)},
	}}
	conversation, err := evals.FromOutage("track", failure, turn, "")
	require.NoError(t, err)
	broken := []evals.Stub{{Error: "no answer", Class: "timeout"}}
	assert.NoDiff(t, broken, conversation.Skills["track"])
	assert.Truef(t, conversation.Name == "track fails: timeout" && conversation.Messages[0].User == "Where is 7?" &&
		len(conversation.Skills["lookup"]) == 1, "case %+v", conversation)
	beat := turn
	beat.TraceID = string(trace.New(trace.Heartbeat))
	heartbeat, err := evals.FromOutage("track", failure, beat, "")
	require.NoError(t, err)
	assert.NoDiff(t, []evals.Message{{User: `Call track with {"order": 7} and say what came of it.`}}, heartbeat.Messages)
	turn.Activities = turn.Activities[1:]
	direct, err := evals.FromOutage("track", failure, turn, "mine")
	require.NoError(t, err)
	assert.Truef(t, direct.Name == "mine" &&
		direct.Messages[0].User == `Call track with {"order": 7} and say what came of it.`, "case %+v", direct)
	assert.NoDiff(t, broken, direct.Skills["track"])

	d := evals.Definition{Name: evals.OutageSuite, Cases: []evals.Case{conversation, direct}}
	require.NoError(t, evals.Validate(d))
	assert.True(t, len(d.OutageCases("track")) == 2 && len(d.OutageCases("lookup")) == 0,
		"the cases of a skill are those in which it fails")
	call := evals.Call{Skill: "track", Args: json.RawMessage(`{}`)}
	reasons := evals.Judge(conversation, evals.Observed{Calls: []evals.Call{call, call, call}})
	assert.Truef(t, len(reasons) == 0, "three calls: %v", reasons)
	reasons = evals.Judge(conversation, evals.Observed{Calls: []evals.Call{call, call, call, call}})
	assert.Truef(t, len(reasons) == 1, "four calls: %v", reasons)
}
