package api

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// A POST with the header Idempotency-Key is handled once. The key belongs to the route and to the caller,
// and is remembered for a day:
//
//   - the same request again gets the first answer again, with Idempotent-Replayed: true;
//   - another request under the same key is refused with 422, one that comes while the first is still
//     handled with 409;
//   - a first attempt whose process died is over when its lease is, and the next one takes its place. What
//     it had committed by then is not undone: a route for which that matters makes it an effect of its key;
//   - what the database could not be told, because it went away, it is told as soon as it is back;
//   - what may turn out otherwise next time is not remembered: failures of ours (5xx), conflicts, limits;
//   - an answer that is a stream, or larger than maxKept, is not kept; the same request again is told so
//     with 409 and the trace of the first.

const (
	keyHeader = "Idempotency-Key"
	maxKey    = 255
	// keyLease is how long an attempt lasts without a sign of life.
	keyLease = 30 * time.Second
	// keyLife is how long a key is remembered.
	keyLife = 24 * time.Hour
	// maxKept is how many bytes of an answer are kept.
	maxKept = 1 << 20
	// settleLimit bounds what is written after the handler, which may have used up the request's time.
	settleLimit = 5 * time.Second
)

// once runs next at most once for a key.
func (s *server) once(rt route, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, given, err := identify(r, rt)
		if err == nil && !given {
			next.ServeHTTP(w, r)
			return
		}
		var first *kept
		if err == nil {
			first, err = s.claim(r.Context(), id)
		}
		switch {
		case err != nil:
			s.refuse(w, r, rt, err, "")
		case first != nil:
			s.repeat(w, r, rt, first)
		default:
			s.attempt(w, r, id, next)
		}
	})
}

// claim hears whether the key was taken also when the client has left: one of which nobody knows would be in the way of the same
// request until its lease ends. One that may have been taken, though the answer was lost, is given up.
func (s *server) claim(ctx context.Context, id *identity) (first *kept, err error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleLimit)
	defer cancel()
	s.unsettled.settle(ctx)
	what := fmt.Sprintf("%s %q", keyHeader, id.key)
	err = s.locks.Try(ctx, what+" of "+id.scope, func(ctx context.Context) error {
		return postgres.Again(ctx, func() (err error) {
			first, err = id.claim(ctx, s.pool)
			return err
		})
	})
	err = postgres.ExplainLock(ctx, s.pool, err, what, "agent_idempotency")
	if err != nil && !postgres.Unchanged(err) {
		s.unsettled.add(id, settlement{})
	}
	return first, err
}

// identify reads which request it is. given is false without a key.
func identify(r *http.Request, rt route) (id *identity, given bool, err error) {
	values, given := r.Header[keyHeader]
	if !given {
		return nil, false, nil
	}
	if len(values) != 1 || !isKey(values[0]) {
		return nil, true, problem.New(http.StatusBadRequest, "%s has to be one value of 1 to %d printable ASCII characters", keyHeader, maxKey).
			Kind("bad-idempotency-key", "Bad idempotency key")
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, true, err
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	hash := sha256.New()
	fmt.Fprintf(hash, "%s?%s\n%q\n", r.URL.EscapedPath(), r.URL.RawQuery, r.Header.Get("X-Thread-Id"))
	hash.Write(body)
	id = &identity{scope: rt.method + " " + rt.path + " " + callerOf(r.Context()), key: values[0], fingerprint: hash.Sum(nil)}
	rand.Read(id.attempt[:]) // never fails
	return id, true, nil
}

func isKey(key string) bool {
	odd := func(c rune) bool { return c < ' ' || c > '~' }
	return strings.TrimSpace(key) != "" && len(key) <= maxKey && !strings.ContainsFunc(key, odd)
}

// callerOf is who calls, so that nobody gets another's answer.
func callerOf(ctx context.Context) string {
	if name, visitor := VisitorFrom(ctx); visitor {
		return "visitor " + name
	}
	return admin
}

// attempt runs next, keeps its answer, and then sends it: an answer that is out is one that is kept.
func (s *server) attempt(w http.ResponseWriter, r *http.Request, id *identity, next http.Handler) {
	stop := s.keepAlive(r.Context(), id)
	held := &holding{ResponseWriter: w}
	whole := false
	defer func() {
		stop()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), settleLimit)
		defer cancel()
		as := settlementOf(held, whole)
		err := postgres.Again(ctx, func() error { return id.settle(ctx, s.pool, as) })
		if err != nil {
			s.unsettled.add(id, as)
			s.log.WarnContext(ctx, "answer to an idempotency key is not kept", "path", problem.Path(r), "error", err)
		}
		if whole {
			held.send()
		}
	}()
	next.ServeHTTP(held, r)
	whole = true
}

// keepAlive renews the lease of an attempt until stop is called.
func (s *server) keepAlive(ctx context.Context, id *identity) (stop func()) {
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
				s.log.WarnContext(ctx, "lease of an idempotency key is not renewed", "error", err)
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// repeat answers for a key that is taken.
func (s *server) repeat(w http.ResponseWriter, r *http.Request, rt route, first *kept) {
	switch {
	case !first.Same:
		s.refuse(w, r, rt, problem.New(http.StatusUnprocessableEntity, "this %s was used for another request", keyHeader).
			Kind("idempotency-key-reused", "Idempotency key reused"), "")
	case first.State == "running":
		w.Header().Set("Retry-After", "1")
		s.refuse(w, r, rt, problem.New(http.StatusConflict, "the first request with this %s is still being handled", keyHeader).
			Kind("idempotency-key-running", "Still running"), "")
	case first.State == "unkept":
		s.refuse(w, r, rt, problem.New(http.StatusConflict, "the request with this %s has been handled; its answer was a stream and is not kept", keyHeader).
			Kind("idempotency-key-used", "Already handled"), first.header()["X-Trace-Id"])
	default:
		for name, value := range first.header() {
			w.Header().Set(name, value)
		}
		w.Header().Set("Idempotent-Replayed", "true")
		w.WriteHeader(first.Status)
		if _, err := w.Write(first.Body); err != nil {
			s.log.DebugContext(r.Context(), "client went away", "path", problem.Path(r), "error", err)
		}
	}
}

// kept is what is known of the first request with a key.
type kept struct {
	Same   bool
	State  string
	Status int
	Header json.RawMessage
	Body   []byte
}

func (k *kept) header() map[string]string {
	var h map[string]string
	if json.Unmarshal(k.Header, &h) != nil {
		return nil // written by identity.settle, and by nobody else
	}
	return h
}
