package api

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// A POST with the header Idempotency-Key runs once. The key belongs to the route and the caller, and lasts a day:
//
//   - a repeated request gets the stored response with Idempotent-Replayed: true;
//   - a different request with the same key gets 422; a request during the first attempt gets 409;
//   - an attempt of a dead process ends with its lease, and the next attempt takes over. The commits of the first stay.
//     A route that must not repeat them derives a database key from the Idempotency-Key;
//   - after an outage, the server stores pending results as soon as the database is back;
//   - the server does not store transient results: 5xx, conflicts, limits;
//   - the server does not store a stream, or a response over maxStored; a repeated request gets 409 and the first
//     trace.

const (
	keyHeader = "Idempotency-Key"
	maxKey    = 255
	// keyLease is the lease of an attempt.
	keyLease = 30 * time.Second
	// keyTTL is the lifetime of a key.
	keyTTL = 24 * time.Hour
	// maxStored bounds a stored response in bytes.
	maxStored = 1 << 20
	// completeTimeout bounds the writes after the handler, which may have used up the request's time.
	completeTimeout = 5 * time.Second
)

// withIdempotency runs next at most once for a key.
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
			s.runAttempt(w, r, id, next)
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
	hash.Write(body)
	id = &keyedRequest{
		scope: rt.method + " " + rt.path + " " + callerOf(r.Context()), key: values[0],
		fingerprint: hash.Sum(nil),
	}
	rand.Read(id.attempt[:]) // never fails
	return id, true, nil
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

// runAttempt runs next, stores its response, and then sends the response. So the database has every sent response.
func (s *server) runAttempt(w http.ResponseWriter, r *http.Request, id *keyedRequest, next http.Handler) {
	stop := s.renewLease(r.Context(), id)
	recorder := &responseRecorder{ResponseWriter: w}
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
		s.writeError(w, r, rt, problem.New(http.StatusConflict, "the request with this %s is done; its streamed response "+
			"was not stored", keyHeader).
			Kind("idempotency-key-used", "Already handled"), prior.header()["X-Trace-Id"])
	default:
		for name, value := range prior.header() {
			w.Header().Set(name, value)
		}
		w.Header().Set("Idempotent-Replayed", "true")
		w.WriteHeader(prior.Status)
		if _, err := w.Write(prior.Body); err != nil {
			s.log.DebugContext(r.Context(), "write response", "path", problem.Path(r), "error", err)
		}
	}
}

// storedResponse is the state of the first request with a key.
type storedResponse struct {
	Same   bool
	State  string
	Status int
	Header json.RawMessage
	Body   []byte
}

func (k *storedResponse) header() map[string]string {
	var h map[string]string
	if json.Unmarshal(k.Header, &h) != nil {
		return nil // only keyedRequest.complete writes it
	}
	return h
}

// keyedRequest is one request with a key: a row of agent_idempotency.
type keyedRequest struct {
	scope, key  string
	fingerprint []byte
	attempt     [16]byte // stored in the row by the claiming attempt
}

// claim claims the key, or returns the first request's state. It also prunes expired keys. A repeated call after a
// broken connection finds its own claim.
func (id *keyedRequest) claim(ctx context.Context, db postgres.DB) (*storedResponse, error) {
	for {
		var claimed bool
		err := db.QueryRow(ctx, `
			with forgotten as (
			  delete from agent_idempotency
			   where (scope, key) in (select o.scope, o.key from agent_idempotency o
			          where o.expires_at <= statement_timestamp() and (o.scope, o.key) <> (@scope, @key)
			          order by o.expires_at limit 20 for update skip locked))
			insert into agent_idempotency as i (scope, key, fingerprint, attempt, lease_until, expires_at)
			select @scope, @key, @fingerprint, @attempt, clock_timestamp() + make_interval(secs => @lease),
			       clock_timestamp() + make_interval(secs => @life)
			  from set_config('lock_timeout', @lock_timeout, true)
			on conflict (scope, key) do update
			   set fingerprint = excluded.fingerprint, attempt = excluded.attempt, state = 'running', status = 0, header = '{}',
			       body = '', lease_until = excluded.lease_until, expires_at = excluded.expires_at
			 where i.expires_at <= clock_timestamp() or i.attempt = excluded.attempt
			    or (i.state = 'running' and i.lease_until <= clock_timestamp() and i.fingerprint = excluded.fingerprint)
			returning true`, postgres.Strict{
			"scope": id.scope, "key": id.key, "fingerprint": id.fingerprint, "attempt": id.attempt, "lease": keyLease.Seconds(),
			"life":         keyTTL.Seconds(),
			"lock_timeout": postgres.LockTimeout,
		}).Scan(&claimed)
		if err == nil {
			return nil, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, fmt.Errorf("claim idempotency key: %w", err)
		}
		prior, err := id.read(ctx, db)
		if !errors.Is(err, pgx.ErrNoRows) { // another attempt released the key meanwhile: retry
			return prior, err
		}
	}
}

// read returns the state of the request that holds the key.
func (id *keyedRequest) read(ctx context.Context, db postgres.DB) (*storedResponse, error) {
	rows, err := db.Query(ctx, `
		select fingerprint = @fingerprint as same, state, status, header, body
		  from agent_idempotency where scope = @scope and key = @key`,
		postgres.Strict{"fingerprint": id.fingerprint, "scope": id.scope, "key": id.key})
	return postgres.CollectOne(rows, err, pgx.ErrNoRows, "read idempotency key",
		pgx.RowToAddrOfStructByName[storedResponse])
}

func (id *keyedRequest) renew(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `
		update agent_idempotency set lease_until = clock_timestamp() + make_interval(secs => @lease)
		 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`,
		postgres.Strict{"lease": keyLease.Seconds(), "scope": id.scope, "key": id.key, "attempt": id.attempt})
	return err
}

// outcome is the response to store, or the release of the key if state is empty.
type outcome struct {
	state  string
	status int
	header map[string]string
	body   []byte
}

// outcomeOf releases the key for a transient response.
func outcomeOf(w *responseRecorder, complete bool) outcome {
	switch {
	case !complete && !w.passthrough, !isFinal(w.code()):
		return outcome{}
	case w.passthrough:
		return outcome{"unkept", w.code(), w.storedHeaders(), w.storedBody()}
	}
	return outcome{"answered", w.code(), w.storedHeaders(), w.storedBody()}
}

// complete stores the response or releases the key. An attempt that lost its lease changes nothing.
func (id *keyedRequest) complete(ctx context.Context, db postgres.DB, out outcome) error {
	if out.state == "" {
		_, err := db.Exec(ctx, `
			delete from agent_idempotency
			 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`,
			postgres.Strict{"scope": id.scope, "key": id.key, "attempt": id.attempt})
		return err
	}
	_, err := db.Exec(ctx, `
		update agent_idempotency set state = @state, status = @status, header = @header, body = @body
		 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`, postgres.Strict{
		"state": out.state, "status": out.status, "header": out.header, "body": out.body,
		"scope": id.scope, "key": id.key, "attempt": id.attempt,
	})
	return err
}

// isFinal reports a status that a retry would not change.
func isFinal(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return status < http.StatusInternalServerError
}

// responseRecorder buffers a response until the server has stored it. A stream or an oversized response passes through.
type responseRecorder struct {
	http.ResponseWriter
	status      int
	body        bytes.Buffer
	passthrough bool
}

func (w *responseRecorder) WriteHeader(status int) {
	switch {
	case status < http.StatusOK:
		w.ResponseWriter.WriteHeader(status)
	case w.status == 0:
		w.status = status
		if kind, _, err := mime.ParseMediaType(w.Header().Get("Content-Type")); err == nil && kind == "text/event-stream" {
			w.passThrough()
		}
	}
}

func (w *responseRecorder) Write(b []byte) (int, error) {
	w.WriteHeader(w.code())
	if !w.passthrough && w.body.Len()+len(b) > maxStored {
		w.passThrough()
	}
	if w.passthrough {
		return w.ResponseWriter.Write(b)
	}
	return w.body.Write(b)
}

// passThrough sends the buffered part and stops buffering.
func (w *responseRecorder) passThrough() {
	if !w.passthrough {
		w.passthrough = true
		w.flushBuffer()
	}
}

// flushBuffer sends the buffered part. The next write reports a disconnected client.
func (w *responseRecorder) flushBuffer() {
	w.ResponseWriter.WriteHeader(w.code())
	if w.body.Len() > 0 {
		_, _ = w.ResponseWriter.Write(w.body.Bytes())
	}
}

// finish sends a buffered response.
func (w *responseRecorder) finish() {
	if !w.passthrough {
		w.flushBuffer()
	}
}

// Flush implements http.Flusher. A flush means a stream.
func (w *responseRecorder) Flush() { _ = w.FlushError() } // the next write reports a disconnected client

func (w *responseRecorder) FlushError() error {
	w.WriteHeader(w.code())
	w.passThrough()
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// Unwrap supports http.ResponseController.
func (w *responseRecorder) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *responseRecorder) code() int { return cmp.Or(w.status, http.StatusOK) }

func (w *responseRecorder) storedBody() []byte {
	if w.passthrough || w.body.Len() == 0 {
		return []byte{}
	}
	return w.body.Bytes()
}

// storedHeaders returns the headers that belong to the response, not to its connection.
func (w *responseRecorder) storedHeaders() map[string]string {
	list := map[string]string{}
	for _, name := range []string{"Content-Type", "Location", "X-Trace-Id", "X-Thread-Id", "X-Request-Id", "ETag"} {
		if v := w.Header().Get(name); v != "" {
			list[name] = v
		}
	}
	return list
}

const (
	// maxPending bounds the pending results. The key of a further result stays blocked until its lease ends.
	maxPending = 1000
	// minFlushPause is the first pause between flushes; it doubles up to maxFlushPause.
	minFlushPause = 50 * time.Millisecond
	maxFlushPause = 2 * time.Second
)

// pendingResults are results that the server could not store during an outage. Until their leases end, their keys would
// block the same requests at every process. The next keyed request flushes these results, and so does a goroutine after
// the outage. The goroutine ends when no result is pending.
type pendingResults struct {
	db   postgres.DB
	stop <-chan struct{} // ends the goroutine; nil means never

	writing chan struct{} // semaphore of flush
	mu      sync.Mutex
	results []pendingResult
	running bool // the goroutine
}

type pendingResult struct {
	request *keyedRequest
	outcome outcome
	until   time.Time // end of its lease
}

func (u *pendingResults) add(id *keyedRequest, out outcome) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.results) >= maxPending {
		return
	}
	u.results = append(u.results, pendingResult{id, out, time.Now().Add(keyLease)})
	if !u.running {
		u.running = true
		go u.run()
	}
}

// run flushes until no result is pending.
func (u *pendingResults) run() {
	pause := minFlushPause
	for {
		select {
		case <-u.stop:
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxFlushPause)
		ctx, cancel := context.WithTimeout(context.Background(), completeTimeout)
		u.flush(ctx)
		cancel()
		u.mu.Lock()
		u.running = len(u.results) > 0
		pending := u.running
		u.mu.Unlock()
		if !pending {
			return
		}
	}
}

// unexpired returns the results whose leases have not ended.
func (u *pendingResults) unexpired() []pendingResult {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.results = slices.DeleteFunc(u.results, func(a pendingResult) bool { return time.Now().After(a.until) })
	return slices.Clone(u.results)
}

// flush stores the pending results as far as possible. Concurrent callers wait for each other.
func (u *pendingResults) flush(ctx context.Context) {
	if len(u.unexpired()) == 0 {
		return
	}
	select {
	case u.writing <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-u.writing }()
	for _, a := range u.unexpired() {
		if postgres.RetryOnDisconnect(ctx, func() error { return a.request.complete(ctx, u.db, a.outcome) }) != nil {
			return
		}
		u.mu.Lock()
		u.results = slices.DeleteFunc(u.results, func(other pendingResult) bool { return other.request == a.request })
		u.mu.Unlock()
	}
}

// withFreshKey runs do under a key derived from the Idempotency-Key, and returns the row's id. Rows outlive keys. If
// the row is older than a key's lifetime, the key is free again. Then withFreshKey runs do with a new key, derived from
// the old key and the id.
func withFreshKey(ctx context.Context, db postgres.DB, key string, do func(key string) (id string, err error)) error {
	for next := key; ; {
		id, err := do(next)
		if err != nil || key == "" {
			return err
		}
		old, err := keyExpired(ctx, db, id)
		if err != nil || !old {
			return err
		}
		next = key + " after " + id
	}
}

// keyExpired reports whether a row is older than a key's lifetime, by the time in its UUIDv7 and the database's clock.
// For a row that is new by this process's clock, it does not query the database.
func keyExpired(ctx context.Context, db postgres.DB, id string) (old bool, err error) {
	hexTime, _, _ := strings.Cut(strings.Replace(id, "-", "", 1), "-")
	milliseconds, err := strconv.ParseInt(hexTime, 16, 64)
	if err != nil {
		return false, fmt.Errorf("read time of id %q: %w", id, err)
	}
	if time.Since(time.UnixMilli(milliseconds)) < keyTTL/2 {
		return false, nil
	}
	err = db.QueryRow(ctx,
		`select @id::uuid < lanekeeper.agent_uuid7_floor(clock_timestamp() - make_interval(secs => @life))`,
		postgres.Strict{"id": id, "life": keyTTL.Seconds()}).Scan(&old)
	if err != nil {
		return false, fmt.Errorf("read the age of %s: %w", id, err)
	}
	return old, nil
}
