package models

import (
	"cmp"
	"context"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"
)

// Retry configures repeated attempts. Zero fields take the defaults.
type Retry struct {
	Attempts int           // in all, including the first; 4
	Base     time.Duration // approximate first wait, doubled for each further one; 500 ms
	MaxWait  time.Duration // the longest wait; 30 s
}

func (r Retry) withDefaults() Retry {
	return Retry{
		Attempts: cmp.Or(r.Attempts, 4),
		Base:     cmp.Or(r.Base, 500*time.Millisecond),
		MaxWait:  cmp.Or(r.MaxWait, 30*time.Second),
	}
}

// wait returns the wait after an attempt, counted from 1, and whether to retry. The backoff is between half and all of
// Base, doubled for each attempt. The wait is the larger of the backoff and the server's Retry-After plus jitter, but
// at most MaxWait.
func (r Retry) wait(attempt int, failure *Error) (time.Duration, bool) {
	if !failure.Retryable || attempt >= r.Attempts || failure.RetryAfter > r.MaxWait {
		return 0, false
	}
	step := r.MaxWait
	if shift := attempt - 1; shift < 20 {
		step = min(r.Base<<shift, r.MaxWait)
	}
	wait := step/2 + jitter(step/2)
	if failure.RetryAfter > 0 {
		wait = max(wait, failure.RetryAfter+jitter(min(step, failure.RetryAfter/4)))
	}
	return min(wait, r.MaxWait), true
}

func jitter(d time.Duration) time.Duration { return rand.N(d + 1) }

// deadlineAllows reports whether ctx ends after wait.
func deadlineAllows(ctx context.Context, wait time.Duration) bool {
	deadline, bounded := ctx.Deadline()
	return !bounded || time.Until(deadline) > wait
}

// retryAfter reads Retry-After-Ms, or Retry-After in seconds or as an HTTP date. It returns 0 for an invalid or past
// value.
func retryAfter(header http.Header, now time.Time) time.Duration {
	if ms, err := strconv.ParseFloat(header.Get("Retry-After-Ms"), 64); err == nil {
		return plausibleWait(ms / 1000)
	}
	text := header.Get("Retry-After")
	if seconds, err := strconv.ParseFloat(text, 64); err == nil {
		return plausibleWait(seconds)
	}
	if date, err := http.ParseTime(text); err == nil {
		if sent, err := http.ParseTime(header.Get("Date")); err == nil {
			now = sent // the clock of this machine may be wrong
		}
		return plausibleWait(date.Sub(now).Seconds())
	}
	return 0
}

// maxRetryAfter bounds a server's Retry-After.
const maxRetryAfter = 7 * 24 * time.Hour

func plausibleWait(seconds float64) time.Duration {
	if !(seconds > 0) { // NaN included
		return 0
	}
	return time.Duration(min(seconds, maxRetryAfter.Seconds()) * float64(time.Second))
}
