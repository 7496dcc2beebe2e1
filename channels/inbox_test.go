package channels

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestStoredTextStatesOmissions(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", maxText)
	for name, test := range map[string]struct {
		message Incoming
		want    string
	}{
		"within the limits": {Incoming{Text: "hello", Files: make([]File, maxFiles)}, "hello"},
		"long text":         {Incoming{Text: long + "y"}, long + "\n[The message is longer.]"},
		"a cut character":   {Incoming{Text: long[1:] + "ä"}, long[1:] + "\n[The message is longer.]"},
		"many files": {
			Incoming{Text: "see these", Files: make([]File, maxFiles+2)},
			"see these\n[2 further files are missing: only 8 of a message are read.]",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			assert.Equal(t, test.want, test.message.boundedText())
		})
	}
}

// limited is a transport with a low limit.
type limited struct{ Transport }

func (limited) Limits() Limits { return Limits{Text: 400} }

// A provider refuses a text over its limit, and nobody would see the request.
func TestRequestForApprovalFitsIntoOneMessage(t *testing.T) {
	t.Parallel()
	limits := Limits{Text: 4000, Length: UTF16}
	for _, test := range []struct {
		arguments string
		whole     bool
	}{
		{`{"a": 1}`, true},
		{"[1" + strings.Repeat(",1", 900) + "]", false},
		{`{"password":"` + strings.Repeat("x", maxArguments) + `"}`, false},
	} {
		text, whole := approvalText(approvals.Approval{Arguments: []byte(test.arguments)}, limits)
		assert.Equal(t, test.whole, whole, test.arguments)
		assert.Equal(t, 1, len(Split(text, limits)))
	}
	w := &worker{transport: limited{}}
	decided := w.decidedText(approvals.Approval{
		Arguments: []byte(`["` + strings.Repeat("some ", 50) + `"]`), Reason: strings.Repeat("reason ", 20),
	})
	assert.Equal(t, 1, len(Split(decided, limited{}.Limits())), decided)
	passwords := "[" + strings.Repeat(`{"password":"x"},`, 120) + "1]"
	text, whole := approvalText(approvals.Approval{Arguments: []byte(passwords)}, Limits{})
	assert.Truef(t, whole && !strings.Contains(text, "_truncated"), "%t: %s", whole, text)
}
