package chat

import "testing"

// TestAClaimThatEndsLateDoesNotSendTheNextAway: a turn that was decided at once goes on in the same process before the run that waited
// has returned. What the database has of it lags behind then, and must not take the place of what is said here.
func TestAClaimThatEndsLateDoesNotSendTheNextAway(t *testing.T) {
	t.Parallel()
	f := newFeed()
	f.begin(1, "", 0)
	f.say("Let me look.")
	f.called()
	f.begin(3, "Let me look.", 0)
	f.say("It is")
	f.away(1)
	f.overheard("Let me look.", true)
	f.say(" done.")
	if v := f.look(true); !v.local || v.leave || v.text != "Let me look.\n\nIt is done." {
		t.Errorf("local %t, waits for leave %t, text %q", v.local, v.leave, v.text)
	}
	f.away(3)
	f.overheard("Let me look.\n\nIt is done. And", false)
	if v := f.look(true); v.local || v.text != "Let me look.\n\nIt is done. And" {
		t.Errorf("after its end here: local %t, text %q", v.local, v.text)
	}
}
