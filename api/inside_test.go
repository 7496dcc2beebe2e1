package api

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

func TestTimesAreUTCAtAnyDepth(t *testing.T) {
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
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(got), "+02:00") || strings.Count(string(got), "2026-01-02T01:04:05Z") != 4 {
		t.Errorf("encoded as %s", got)
	}
	if v.List[0].At != there || *v.List[0].Once != there || v.Next.At != there {
		t.Error("the value itself was changed")
	}
}

func TestAPanicIsAProblemWithoutItsStack(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	s := &server{gate: &gate{}, budgets: newBudgets(), limits: usual(), log: slog.New(slog.NewTextHandler(&log, nil))}
	h := s.wrap(s.serve(route{access: Public, handle: func(request) (answer, error) { panic("the secret inside") }}))
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/x", nil))
	if w.Code != http.StatusInternalServerError || w.Header().Get("Content-Type") != "application/problem+json" {
		t.Errorf("answer is %d %v", w.Code, w.Header())
	}
	if strings.Contains(w.Body.String(), "secret") || strings.Contains(w.Body.String(), "goroutine") {
		t.Errorf("the client is told %s", w.Body)
	}
	if !strings.Contains(log.String(), "the secret inside") || !strings.Contains(log.String(), "goroutine") {
		t.Errorf("the log says %s", log.String())
	}
}

func TestHalfAnAnswerIsCutOff(t *testing.T) {
	t.Parallel()
	s := &server{gate: &gate{}, budgets: newBudgets(), limits: usual(), log: slog.New(slog.DiscardHandler)}
	h := s.wrap(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte("half"))
		panic("then nothing")
	}))
	defer func() {
		if recover() != http.ErrAbortHandler { //nolint:errorlint // the very value that net/http asks for
			t.Error("the connection is not aborted")
		}
	}()
	h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), "GET", "/x", nil))
}

func TestWhatCannotBeEncodedIsAProblem(t *testing.T) {
	t.Parallel()
	s := &server{gate: &gate{}, budgets: newBudgets(), limits: usual(), log: slog.New(slog.DiscardHandler)}
	h := s.serve(route{access: Public, handle: func(request) (answer, error) {
		return answer{body: struct {
			F func() `json:"f"`
		}{}}, nil
	}})
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/x", nil))
	if w.Code != http.StatusInternalServerError || !json.Valid(w.Body.Bytes()) {
		t.Errorf("answer is %d %s", w.Code, w.Body)
	}
}
