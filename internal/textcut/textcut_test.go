package textcut_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

func TestTextKeepsWholeCharacters(t *testing.T) {
	for text, want := range map[string]string{"": "", "äb": "äb", "abc": "abc", "abcd": "abc…", "abä": "ab…"} {
		assert.Equal(t, want, textcut.Text(text, 3), text)
	}
	assert.Equal(t, "a\uFFFD…", textcut.Stored("a\x00bcd", 4))
	assert.Equal(t, "\uFFFDa", textcut.Stored("\xffa", 4))
}
