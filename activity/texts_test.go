package activity_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestRowsWithTextsNeedThreadsRead(t *testing.T) {
	t.Parallel()
	for skill, kind := range map[string]activity.Kind{
		"wait_for_response": activity.KindPhase, // of a flow: a visitor's message
		"reasoning":         activity.KindCall,  // a stalled turn: its last messages
	} {
		assert.Truef(t, activity.HasTexts(kind, skill), "a %s of %s", kind, skill)
	}
	assert.Truef(t, !activity.HasTexts(activity.KindCall, "look"), "a call of a workspace skill")
}
