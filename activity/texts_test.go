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
		"set_memory":        activity.KindNote,  // an admin's: the replaced value
		"delete_document":   activity.KindNote,  // an admin's: the document's name
		"name_thread":       activity.KindNote,  // an admin's: the title
		"pair_sender":       activity.KindNote,  // an admin's: the sender
		"unpair_sender":     activity.KindNote,
	} {
		assert.Truef(t, activity.HasTexts(kind, skill), "a %s of %s", kind, skill)
	}
	assert.Truef(t, !activity.HasTexts(activity.KindCall, "look"), "a call of a workspace skill")
}
