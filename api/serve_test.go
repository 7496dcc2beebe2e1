package api

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/ssetest"
)

func TestTimesAreUTC(t *testing.T) {
	t.Parallel()
	type Inner struct {
		At   time.Time  `json:"at"`
		Once *time.Time `json:"once"`
		Raw  json.RawMessage
	}
	type outer struct {
		Inner
		List []Inner `json:"list"`
		Next *Inner  `json:"next"`
	}
	there := time.Date(2026, 1, 2, 3, 4, 5, 0, time.FixedZone("there", 7200))
	v := outer{Inner: Inner{At: there}, List: []Inner{{At: there, Once: &there}}, Next: &Inner{At: there}}
	got, err := encode(&v)
	require.NoError(t, err)
	assert.Truef(t, !strings.Contains(string(got), "+02:00") && strings.Count(string(got), "2026-01-02T01:04:05Z") == 4,
		"encoded as %s", got)
	for _, at := range []time.Time{v.List[0].At, *v.List[0].Once, v.Next.At} {
		assert.Equal(t, there.String(), at.String(), "the value itself")
	}
}

func TestPanicIsProblem(t *testing.T) {
	t.Parallel()
	s, h := newBareServer(t, route{
		access: Public,
		handle: func(request) (response, error) { panic("the secret inside") },
	})
	var log bytes.Buffer
	s.log = slog.New(slog.NewTextHandler(&log, nil))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/x", nil))
	assert.Truef(t, w.Code == http.StatusInternalServerError &&
		w.Header().Get("Content-Type") == "application/problem+json", "answer is %d %v", w.Code, w.Header())
	assert.Truef(t, !strings.Contains(w.Body.String(), "secret") && !strings.Contains(w.Body.String(), "goroutine"),
		"the client gets %s", w.Body)
	assert.Truef(t, strings.Contains(log.String(), "the secret inside") && strings.Contains(log.String(), "goroutine"),
		"the log says %s", log.String())
}

func TestPanicAbortsStartedResponse(t *testing.T) {
	t.Parallel()
	breaks := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("half"))
		panic("then nothing")
	})
	_, h := newBareServer(t, route{access: Public, httpHandler: breaks})
	defer func() {
		if recover() != http.ErrAbortHandler { //nolint:errorlint // net/http compares the value
			t.Error("the connection is not aborted")
		}
	}()
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "GET", "/x", nil))
}

func TestServerErrorHasFormatOfRoute(t *testing.T) {
	t.Parallel()
	for name, fn := range map[string]func(request) (response, error){
		"encoding error": func(request) (response, error) { return response{body: map[string]any{"f": func() {}}}, nil },
		"panic":          func(request) (response, error) { panic("the secret inside") },
	} {
		for _, openAI := range []bool{false, true} {
			_, h := newBareServer(t, route{access: Public, openAI: openAI, handle: fn})
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/x", nil))
			var got struct{ Error, Title any }
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &got), name)
			assert.Truef(t, w.Code == http.StatusInternalServerError && (got.Error != nil) == openAI &&
				(got.Title != nil) != openAI, "%s, OpenAI %t: %d %s", name, openAI, w.Code, w.Body)
		}
	}
}

// FuzzStream streams any stored values and reads them like a client.
func FuzzStream(f *testing.F) {
	for i, text := range []string{
		"running", "a\nb\r\nc\rd", "\n\nid: 9\nevent: status\ndata: {}\n\n", "\x00", "\xff\xfe", "\u2028\ufeff", "</script>",
		strings.Repeat("x\r", 3000),
	} {
		f.Add(text, text, text, i)
	}
	f.Fuzz(func(t *testing.T, id, status, waitingFor string, change int) {
		w := httptest.NewRecorder()
		e := executions.StatusChange{
			ID: id, TraceID: id, Status: executions.Status(status), WaitingFor: &waitingFor,
			Claim: int64(change), Change: change,
		}
		for range 2 {
			require.NoError(t, sendEvent(w, e))
		}
		got := ssetest.Read(w.Body.String())
		require.Truef(t, len(got.Events) == 2 && len(got.Unknown)+len(got.Comments)+len(got.Retry) == 0 && got.Left == "",
			"%q are not two events", w.Body)
		for _, event := range got.Events {
			var read executions.StatusChange
			err := json.Unmarshal([]byte(event.Data), &read)
			require.Truef(t, err == nil && event.Name == "status", "event %+v: %v", event, err)
			if !utf8.ValidString(id + status + waitingFor) {
				continue
			}
			read.Claim, read.Change = e.Claim, e.Change
			assert.NoDiff(t, e, read)
			if !strings.ContainsAny(status, "\r\n\x00") && event.ID != eventID(e) {
				t.Errorf("the id is %q, not %q", event.ID, eventID(e))
			}
		}
	})
}

func TestEveryReservedFlowHasAHint(t *testing.T) {
	if here := slices.Sorted(maps.Keys(reservedFlows)); !slices.Equal(here, executions.Reserved()) {
		t.Errorf("HTTP has %v, the engine %v", here, executions.Reserved())
	}
}
