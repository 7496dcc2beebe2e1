package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"mime"
	"net/http"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// Of the POSTs with one Idempotency-Key, one at a time has the key's lease and runs, and none after the server has
// stored a response. The key belongs to the route and the caller, and lasts a day:
//
//   - a repeated request gets the stored response with Idempotent-Replayed: true;
//   - a different request with the same key gets 422; a request during the first attempt gets 409;
//   - an attempt of a dead or stopped process loses its lease, and the next attempt takes over. The commits of the
//     first stay. A route that must not repeat them derives a database key from the Idempotency-Key;
//   - after an outage shorter than a lease, the server stores the pending results, up to maxPending;
//   - the server does not store an error, so a corrected request may use the key again;
//   - the server does not store a stream, a response over maxStored, or one with a secret; a repeated request gets 409
//     and the first trace.

const (
	keyHeader = "Idempotency-Key"
	// replayedHeader marks a stored response.
	replayedHeader = "Idempotent-Replayed"

	maxKey = 255
	// keyLease is the lease of an attempt.
	keyLease = 30 * time.Second
	// keyTTL is the lifetime of a key.
	keyTTL = 24 * time.Hour
	// maxStored bounds a stored response in bytes.
	maxStored = 1 << 20
	// completeTimeout bounds the writes after the handler, which may have used up the request's time.
	completeTimeout = 5 * time.Second
)

// withIdempotency runs next unless another request holds the key or has completed it.
func (s *server) withIdempotency(rt route, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, given, err := identify(r, rt)
		if err == nil && !given {
			next.ServeHTTP(w, r)
			return
		}
		var prior *storedResponse
		if err == nil {
			prior, err = s.claim(r.Context(), id)
		}
		switch {
		case err != nil:
			s.writeError(w, r, rt, err, "")
		case prior != nil:
			s.replay(w, r, rt, prior)
		default:
			s.runAttempt(w, r, rt, id, next)
		}
	})
}

// claim completes even if the client disconnected: an orphaned claim would block the same request until its lease ends.
// It releases a claim whose result was lost.
func (s *server) claim(ctx context.Context, id *keyedRequest) (prior *storedResponse, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), completeTimeout)
	defer cancel()
	s.pending.flush(ctx)
	what := fmt.Sprintf("%s %q", keyHeader, id.key)
	err = s.locks.Try(ctx, what+" of "+id.scope, func(ctx context.Context) error {
		return postgres.RetryOnDisconnect(ctx, func() (err error) {
			prior, err = id.claim(ctx, s.pool)
			return err
		})
	})
	err = postgres.ExplainLock(ctx, s.pool, err, what, "agent_idempotency")
	if err != nil && !postgres.Unchanged(err) {
		s.pending.add(id, outcome{})
	}
	return prior, err
}

// identify reads the key and the request's fingerprint. given is false without a key.
func identify(r *http.Request, rt route) (id *keyedRequest, given bool, err error) {
	values, given := r.Header[keyHeader]
	if !given {
		return nil, false, nil
	}
	if len(values) != 1 || !isKey(values[0]) {
		return nil, true, problem.New(http.StatusBadRequest, "%s must be one value of 1 to %d printable ASCII characters",
			keyHeader, maxKey).
			Kind("bad-idempotency-key", "Bad idempotency key")
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, true, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	hash := sha256.New()
	fmt.Fprintf(hash, "%s?%s\n%q\n", r.URL.EscapedPath(), r.URL.RawQuery, r.Header.Get("X-Thread-Id"))
	if expected := r.Header.Get("If-Match"); expected != "" {
		fmt.Fprintf(hash, "%q\n", expected)
	}
	hash.Write(withoutBoundary(r, body))
	id = &keyedRequest{
		scope: rt.method + " " + rt.path + " " + callerOf(r.Context()), key: values[0],
		fingerprint: hash.Sum(nil),
	}
	rand.Read(id.attempt[:]) // never fails
	return id, true, nil
}

// withoutBoundary removes the delimiters of a form, because clients invent a new boundary for each attempt.
func withoutBoundary(r *http.Request, body []byte) []byte {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "multipart/form-data" || params["boundary"] == "" {
		return body
	}
	return bytes.ReplaceAll(body, []byte("--"+params["boundary"]), nil)
}

func isKey(key string) bool {
	invalid := func(c rune) bool { return c < ' ' || c > '~' }
	return strings.TrimSpace(key) != "" && len(key) <= maxKey && !strings.ContainsFunc(key, invalid)
}

// callerOf separates the keys of callers, so no caller gets another's response.
func callerOf(ctx context.Context) string {
	if name, visitor := VisitorFrom(ctx); visitor {
		return "visitor " + name
	}
	if name := actorName(ctx); name != principals.Root {
		return "principal " + name
	}
	return "admin"
}

// runAttempt runs next, stores its response, and then sends the response. If the database does not store it,
// pendingResults does so later. A stream, or an oversized response, passes through while next runs.
func (s *server) runAttempt(w http.ResponseWriter, r *http.Request, rt route, id *keyedRequest, next http.Handler) {
	stop := s.renewLease(r.Context(), id)
	recorder := &responseRecorder{ResponseWriter: w, secret: rt.secret != ""}
	complete := false
	defer func() {
		stop()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), completeTimeout)
		defer cancel()
		result := outcomeOf(recorder, complete)
		err := postgres.RetryOnDisconnect(ctx, func() error { return id.complete(ctx, s.pool, result) })
		if err != nil {
			s.pending.add(id, result)
			s.log.WarnContext(ctx, "response of an idempotency key not stored", "path", problem.Path(r), "error", err)
		}
		if complete {
			recorder.finish()
		}
	}()
	next.ServeHTTP(recorder, r)
	complete = true
}

// renewLease renews the lease of an attempt until stop is called.
func (s *server) renewLease(ctx context.Context, id *keyedRequest) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(keyLease / 4)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if err := id.renew(ctx, s.pool); err != nil && ctx.Err() == nil {
				s.log.WarnContext(ctx, "lease of an idempotency key not renewed", "error", err)
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// replay responds for a key that is already claimed.
func (s *server) replay(w http.ResponseWriter, r *http.Request, rt route, prior *storedResponse) {
	switch {
	case !prior.Same:
		s.writeError(w, r, rt, problem.New(http.StatusUnprocessableEntity, "this %s was used for a different request",
			keyHeader).
			Kind("idempotency-key-reused", "Idempotency key reused"), "")
	case prior.State == "running":
		w.Header().Set("Retry-After", "1")
		s.writeError(w, r, rt, problem.New(http.StatusConflict, "the first request with this %s is still running", keyHeader).
			Kind("idempotency-key-running", "Still running"), "")
	case prior.State == "unkept":
		h, which, where := prior.header(), "streamed response", ""
		if rt.secret != "" {
			which, where = "response has a secret and", "; "+rt.secret
		} else if thread := h["X-Thread-Id"]; thread != "" {
			where = "; see thread " + thread
		}
		s.writeError(w, r, rt, problem.New(http.StatusConflict, "the request with this %s is done; its %s was not stored%s",
			keyHeader, which, where).
			Kind("idempotency-key-used", "Already handled"), h["X-Trace-Id"])
	default:
		for name, value := range prior.header() {
			w.Header().Set(name, value)
		}
		w.Header().Set(replayedHeader, "true")
		w.WriteHeader(prior.Status)
		if _, err := w.Write(prior.Body); err != nil {
			s.log.DebugContext(r.Context(), "write response", "path", problem.Path(r), "error", err)
		}
	}
}

// outcomeOf releases the key after an error.
func outcomeOf(w *responseRecorder, complete bool) outcome {
	switch {
	case !complete && !w.passthrough, w.code() >= http.StatusBadRequest:
		return outcome{}
	case w.passthrough || w.secret:
		return outcome{"unkept", w.code(), w.storedHeaders(), w.storedBody()}
	}
	return outcome{"answered", w.code(), w.storedHeaders(), w.storedBody()}
}
