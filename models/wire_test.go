package models

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func filtered(tb testing.TB, in io.Reader) string {
	tb.Helper()
	out, err := io.ReadAll(newDataLines(in))
	require.NoError(tb, err)
	return string(out)
}

func TestOnlyDataLinesAreForwarded(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ in, want string }{
		"data":                    {"data: {}\n\n", "data: {}\n\n"},
		"comment":                 {": PROCESSING\n\ndata: {}\n\n", "data: {}\n\n"},
		"blank lines":             {"\n\n\ndata: 1\n\n\n\n\ndata: 2\n\n", "data: 1\n\ndata: 2\n\n"},
		"no blank line between":   {"data: 1\ndata: 2\n", "data: 1\n\ndata: 2\n\n"},
		"no space after colon":    {"data:1\n\n", "data: 1\n\n"},
		"event, id and retry":     {"event: error\nid: 7\nretry: 10\ndata: 1\n\n", "data: 1\n\n"},
		"CRLF":                    {"data: 1\r\n\r\ndata: 2\r\n\r\n", "data: 1\n\ndata: 2\n\n"},
		"CR":                      {"data: 1\r\rdata: 2\r\r", "data: 1\n\ndata: 2\n\n"},
		"no end of line":          {"data: 1", "data: 1\n\n"},
		"byte order mark":         {"\xef\xbb\xbfdata: 1\n\n", "data: 1\n\n"},
		"no field name":           {"{\"error\":{}}\n", "data: { \"error\":{}}\n\n"},
		"error after comment":     {": wait\n\ndata: {\"error\":{}}\n\n", "data: { \"error\":{}}\n\n"},
		"empty data":              {"data:\n\ndata: \n\ndata: 1\n\n", "data: 1\n\n"},
		"unknown field":           {"database: 1\n\ndata: 1\n\n", "data: 1\n\n"},
		"nothing":                 {"", ""},
		"data that has a comment": {"data: : x\n\n", "data: : x\n\n"},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.want, filtered(t, strings.NewReader(test.in)))
		})
	}
}

func TestEndMarkerIsSeen(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{
		"data: [DONE]\n\n": true, "data:[DONE]": true, "data: {}\n\n": false,
		": [DONE]\n": false,
	} {
		lines := newDataLines(strings.NewReader(text))
		_, err := io.ReadAll(lines)
		assert.Truef(t, err == nil && lines.done == want, "%q: done = %v (%v), want %v", text, lines.done, err, want)
	}
}

func TestLineIsForwardedAtOnce(t *testing.T) {
	t.Parallel()
	in, out := io.Pipe()
	go func() {
		_, err := out.Write([]byte("data: 1\r"))
		assert.NoError(t, err)
	}()
	p := make([]byte, 64)
	n, err := newDataLines(in).Read(p)
	assert.Truef(t, err == nil && string(p[:n]) == "data: 1\n\n", "got %q, %v", p[:n], err)
}

func TestAnswerWithoutEndIsRejected(t *testing.T) {
	t.Parallel()
	endless := io.MultiReader(strings.NewReader("data: "), endlessReader{})
	_, err := io.Copy(io.Discard, newDataLines(endless))
	assert.Error(t, err, "an endless line was read to its end")
}

type endlessReader struct{}

func (endlessReader) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = 'x'
	}
	return len(p), nil
}

func TestBrokenConnectionStaysBroken(t *testing.T) {
	t.Parallel()
	lines := newDataLines(io.MultiReader(strings.NewReader("data: 1\n"), iotest.ErrReader(io.ErrUnexpectedEOF)))
	out, err := io.ReadAll(lines)
	assert.Truef(t, string(out) == "data: 1\n\n" && errors.Is(err, io.ErrUnexpectedEOF), "got %q, %v", out, err)
}

var dataForm = regexp.MustCompile(`^(?:data: [^\r\n]+\n\n)*$`)

func FuzzDataLines(f *testing.F) {
	for _, seed := range []string{
		"data: {}\n\n", ": c\n\ndata: {\"error\":{\"message\":\"m\"}}\n\n", "id: 1\r\ndata: x\r\n\r\n",
		"\xef\xbb\xbfdata:1\r\r{\n",
		"data: [DONE]", "data: { \"error\"", "data: \x00\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		once := filtered(t, bytes.NewReader(in))
		assert.Truef(t, dataForm.MatchString(once), "%q became %q, which is not data lines alone", in, once)
		assert.Truef(t, !strings.Contains(once, `data: {"error"`),
			"%q became %q, which go-openai takes for an error of its own", in, once)
		assert.Equal(t, once, filtered(t, strings.NewReader(once)))
		assert.Equal(t, once, filtered(t, iotest.OneByteReader(bytes.NewReader(in))))
	})
}

func TestRetryAfterForms(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for name, test := range map[string]struct {
		header, value string
		want          time.Duration
	}{
		"none":         {"Retry-After", "", 0},
		"seconds":      {"Retry-After", "7", 7 * time.Second},
		"fraction":     {"Retry-After", "0.5", 500 * time.Millisecond},
		"date":         {"Retry-After", "Fri, 02 Jan 2026 03:05:05 GMT", time.Minute},
		"past date":    {"Retry-After", "Fri, 02 Jan 2026 03:00:00 GMT", 0},
		"milliseconds": {"Retry-After-Ms", "250", 250 * time.Millisecond},
		"negative":     {"Retry-After", "-3", 0},
		"no number":    {"Retry-After", "NaN", 0},
		"word":         {"Retry-After", "soon", 0},
		"endless":      {"Retry-After", "1e300", maxRetryAfter},
		"infinite":     {"Retry-After", "Inf", maxRetryAfter},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.want, retryAfter(http.Header{test.header: {test.value}}, now), test.header, test.value)
			if name == "date" {
				slow := http.Header{test.header: {test.value}, "Date": {now.Format(http.TimeFormat)}}
				assert.Equal(t, test.want, retryAfter(slow, now.Add(-time.Hour)), "with a clock that is slow")
			}
		})
	}
}

func TestRetryWaitsGrowToMaximum(t *testing.T) {
	t.Parallel()
	r := Retry{Attempts: 100, Base: time.Second, MaxWait: 10 * time.Second}
	for attempt, top := range map[int]time.Duration{
		1: time.Second, 2: 2 * time.Second, 3: 4 * time.Second,
		5: 10 * time.Second, 90: 10 * time.Second,
	} {
		differ := false
		first, _ := r.wait(attempt, &Error{Retryable: true})
		for range 100 {
			d, again := r.wait(attempt, &Error{Retryable: true})
			if !again || d < top/2 || d > top {
				t.Fatalf("wait after attempt %d = %s (%v), want %s to %s", attempt, d, again, top/2, top)
			}
			differ = differ || d != first
		}
		assert.Truef(t, differ, "waits after attempt %d have no jitter", attempt)
	}
}

func TestRetryDecision(t *testing.T) {
	t.Parallel()
	r := Retry{Attempts: 3, Base: time.Second, MaxWait: 10 * time.Second}
	for name, test := range map[string]struct {
		attempt int
		failure Error
		again   bool
	}{
		"may pass":       {1, Error{Retryable: true}, true},
		"will not pass":  {1, Error{}, false},
		"last attempt":   {3, Error{Retryable: true}, false},
		"short patience": {1, Error{Retryable: true, RetryAfter: 10 * time.Second}, true},
		"tiny patience":  {2, Error{Retryable: true, RetryAfter: time.Millisecond}, true},
		"long patience":  {1, Error{Retryable: true, RetryAfter: 11 * time.Second}, false},
	} {
		t.Run(name, func(t *testing.T) {
			wait, again := r.wait(test.attempt, &test.failure)
			assert.Truef(t, again == test.again, "again = %v, want %v", again, test.again)
			least := max(test.failure.RetryAfter, r.Base<<(test.attempt-1)/2)
			assert.Truef(t, !again || wait >= least && wait <= r.MaxWait, "wait = %s, want %s to %s", wait, least, r.MaxWait)
		})
	}
}

// A message has no part of a secret, even if the limit cuts the secret, or if another secret is part of it.
func TestNoPartOfASecretStays(t *testing.T) {
	t.Parallel()
	c := Config{APIKey: "hunter", Headers: map[string]string{"X-Key": "hunter2-long"}}
	for _, text := range []string{"it is hunter2-long!", strings.Repeat("x", maxMessageRunes-10) + " hunter2-long"} {
		message := apiError(http.StatusBadRequest, nil, []byte(text)).scrubbed(c.secrets()).Message
		assert.Truef(t, !strings.Contains(message, "unter"), "got %s", message)
		assert.Truef(t, !strings.Contains(message, "2-lo"), "got %s", message)
		assert.Truef(t, len(message) <= maxMessageRunes+len("…"), "%d bytes", len(message))
	}
}
