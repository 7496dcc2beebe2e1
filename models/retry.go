package models

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	openai "github.com/sashabaranov/go-openai"
)

// longestRetryAfter is how long a server's word is believed.
const longestRetryAfter = 7 * 24 * time.Hour

func (r Retry) withDefaults() Retry {
	return Retry{
		Attempts: cmp.Or(r.Attempts, 4),
		Base:     cmp.Or(r.Base, 500*time.Millisecond),
		MaxWait:  cmp.Or(r.MaxWait, 30*time.Second),
	}
}

// wait is how long to wait after the given attempt, counted from 1, and whether to go on at all. The
// wait is between half and all of Base, doubled for each attempt made, and never shorter than the server asked.
func (r Retry) wait(attempt int, failure *Error) (time.Duration, bool) {
	if !failure.Retryable || attempt >= r.Attempts || failure.RetryAfter > r.MaxWait {
		return 0, false
	}
	step := r.MaxWait
	if shift := attempt - 1; shift < 20 {
		step = min(r.Base<<shift, r.MaxWait)
	}
	if failure.RetryAfter > 0 {
		return failure.RetryAfter + jitter(min(step, failure.RetryAfter/4)), true
	}
	return step/2 + jitter(step/2), true
}

func jitter(d time.Duration) time.Duration { return rand.N(d + 1) }

// reaches reports whether ctx lives longer than a wait.
func reaches(ctx context.Context, wait time.Duration) bool {
	deadline, bounded := ctx.Deadline()
	return !bounded || time.Until(deadline) > wait
}

// retryAfter reads how long a server wants to be left alone: Retry-After-Ms, or Retry-After in seconds or as an HTTP
// date. What is not understood or already past is 0.
func retryAfter(header http.Header, now time.Time) time.Duration {
	if ms, err := strconv.ParseFloat(header.Get("Retry-After-Ms"), 64); err == nil {
		return believed(ms / 1000)
	}
	text := header.Get("Retry-After")
	if seconds, err := strconv.ParseFloat(text, 64); err == nil {
		return believed(seconds)
	}
	if date, err := http.ParseTime(text); err == nil {
		return believed(date.Sub(now).Seconds())
	}
	return 0
}

func believed(seconds float64) time.Duration {
	if !(seconds > 0) { // also when it is no number
		return 0
	}
	return time.Duration(min(seconds, longestRetryAfter.Seconds()) * float64(time.Second))
}

// transportError is an error of the connection, or of go-openai before it sent anything.
func transportError(err error) *Error {
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		err = wrapped.Err // the outer text repeats the URL
	}
	e := &Error{Message: oneLine(err.Error()), Retryable: true, cause: err}
	var dns *net.DNSError
	var certificate *tls.CertificateVerificationError
	var dial *net.OpError
	switch {
	case errors.As(err, &dns):
		e.Code, e.Retryable = codeUnreachable, !dns.IsNotFound
	case errors.As(err, &certificate):
		e.Code, e.Retryable = codeUnreachable, false
	case errors.As(err, &dial) && dial.Op == "dial":
		e.Code = codeUnreachable
	case refusedUnsent(err), errors.Is(err, errWebPage), errors.Is(err, errAnswerTooLong):
		e.Retryable = false
	}
	return e
}

// refusedUnsent reports whether go-openai found the request unfit for the model it names.
func refusedUnsent(err error) bool {
	for _, unfit := range []error{
		openai.ErrChatCompletionInvalidModel, openai.ErrContentFieldsMisused,
		openai.ErrReasoningModelMaxTokensDeprecated, openai.ErrReasoningModelLimitationsOther,
		openai.ErrReasoningModelLimitationsLogprobs, openai.ErrReasoningEffortUnsupported,
		openai.ErrReasoningToolsRequireResponses, openai.ErrReasoningSamplingUnsupported,
	} {
		if errors.Is(err, unfit) {
			return true
		}
	}
	return false
}
