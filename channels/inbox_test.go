package channels

import (
	"strings"
	"testing"

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
