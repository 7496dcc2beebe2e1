package responsewire_test

import (
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/responsewire"
)

// event has the fields of an event that the tests read.
type event struct {
	Type     string
	Number   int `json:"sequence_number"`
	Delta    string
	Text     string
	Response struct {
		Status string
		Output []struct {
			Status  string
			Content []struct{ Text string }
		}
	}
}

// streamed sends the pieces and the final response, and returns the events.
func streamed(t *testing.T, pieces []string, final responsewire.Response) []event {
	t.Helper()
	w := httptest.NewRecorder()
	s := responsewire.Open(w, responsewire.Response{ID: "resp_1", ItemID: "msg_1"})
	for _, piece := range pieces {
		s.Text(piece)
		s.Idle()
	}
	s.Finish(final)
	require.NoError(t, s.Err())
	var events []event
	for line := range strings.Lines(w.Body.String()) {
		if data, ok := strings.CutPrefix(line, "data: "); ok {
			var e event
			require.NoError(t, json.Unmarshal([]byte(data), &e), data)
			events = append(events, e)
		}
	}
	return events
}

func TestEventsAreOrderedAndComplete(t *testing.T) {
	t.Parallel()
	const (
		head  = "created in_progress "
		begun = head + "output_item.added content_part.added "
		text  = "output_text.delta "
		done  = "output_text.done content_part.done output_item.done "
	)
	for name, c := range map[string]struct {
		pieces       []string
		status, text string
		types        string
		sent         string // all deltas
		item         string // status of the message; "" for none
	}{
		"streamed text": {
			[]string{"a", "b"}, "completed", "ab", begun + text + text + done + "completed", "ab", "completed",
		},
		"missing rest": {
			[]string{"a"}, "completed", "abc", begun + text + text + done + "completed", "abc", "completed",
		},
		"unstreamed text": {nil, "incomplete", "abc", begun + text + done + "incomplete", "abc", "incomplete"},
		"empty answer":    {nil, "completed", "", begun + done + "completed", "", "completed"},
		"early failure":   {nil, "failed", "", head + "failed", "", ""},
		"late failure":    {[]string{"a"}, "failed", "", begun + text + done + "failed", "a", "incomplete"},
		"late cancel":     {[]string{"a"}, "cancelled", "", begun + text + done + "failed", "a", "incomplete"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			events := streamed(t, c.pieces, responsewire.Response{ID: "resp_1", ItemID: "msg_1", Status: c.status, Text: c.text})
			var types []string
			sent := ""
			for i, e := range events {
				assert.Equal(t, i, e.Number, e.Type)
				types = append(types, strings.TrimPrefix(e.Type, "response."))
				sent += e.Delta
				if e.Type == "response.output_text.done" {
					assert.Equal(t, c.sent, e.Text)
				}
			}
			assert.Equal(t, c.types, strings.Join(types, " "))
			assert.Equal(t, c.sent, sent)
			last := events[len(events)-1].Response
			assert.Equal(t, c.status, last.Status)
			if c.item == "" {
				assert.Equal(t, 0, len(last.Output))
				return
			}
			require.Equal(t, 1, len(last.Output))
			assert.Equal(t, c.item, last.Output[0].Status)
			assert.Equal(t, c.sent, last.Output[0].Content[0].Text)
		})
	}
}
