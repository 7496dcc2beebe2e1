package models

import (
	"net/http"
	"testing"
	"time"
)

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
		"endless":      {"Retry-After", "1e300", longestRetryAfter},
		"infinite":     {"Retry-After", "Inf", longestRetryAfter},
	} {
		t.Run(name, func(t *testing.T) {
			if got := retryAfter(http.Header{test.header: {test.value}}, now); got != test.want {
				t.Errorf("%s: %q is %s, want %s", test.header, test.value, got, test.want)
			}
		})
	}
}

func TestWaitsGrowAndAreBounded(t *testing.T) {
	t.Parallel()
	r := Retry{Attempts: 100, Base: time.Second, MaxWait: 10 * time.Second}
	for attempt, top := range map[int]time.Duration{1: time.Second, 2: 2 * time.Second, 3: 4 * time.Second, 5: 10 * time.Second, 90: 10 * time.Second} {
		differ := false
		first, _ := r.wait(attempt, &Error{Retryable: true})
		for range 100 {
			d, again := r.wait(attempt, &Error{Retryable: true})
			if !again || d < top/2 || d > top {
				t.Fatalf("wait after attempt %d = %s (%v), want %s to %s", attempt, d, again, top/2, top)
			}
			differ = differ || d != first
		}
		if !differ {
			t.Errorf("waits after attempt %d have no jitter", attempt)
		}
	}
}

func TestNoWaitWhereItCannotHelp(t *testing.T) {
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
		"long patience":  {1, Error{Retryable: true, RetryAfter: 11 * time.Second}, false},
	} {
		t.Run(name, func(t *testing.T) {
			wait, again := r.wait(test.attempt, &test.failure)
			if again != test.again || again && wait < test.failure.RetryAfter {
				t.Errorf("wait = %s, %v, want %v", wait, again, test.again)
			}
		})
	}
}
