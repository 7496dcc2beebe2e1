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

// claim hears whether the key was taken also when the client has left: one of which nobody knows would be in the way
// of the same request until its lease ends. One that may have been taken, though the answer was lost, is given up.
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

// identity is one request with a key: a row of agent_idempotency.
type identity struct {
	scope, key  string
	fingerprint []byte
	attempt     [16]byte // the id of this attempt, which the row has when the request is ours to handle
}

// claim takes the key for this request, or tells what is known of the first one. It also forgets some of
// the keys whose day is over. Called again when its connection broke, it finds what it took the first time.
func (id *identity) claim(ctx context.Context, db postgres.DB) (*kept, error) {
	for {
		var ours bool
		err := db.QueryRow(ctx, `
			with forgotten as (
			  delete from agent_idempotency
			   where (scope, key) in (select o.scope, o.key from agent_idempotency o
			          where o.expires_at <= statement_timestamp() and (o.scope, o.key) <> (@scope, @key)
			          order by o.expires_at limit 20 for update skip locked))
			insert into agent_idempotency as i (scope, key, fingerprint, attempt, lease_until, expires_at)
			select @scope, @key, @fingerprint, @attempt, clock_timestamp() + make_interval(secs => @lease), clock_timestamp() + make_interval(secs => @life)
			  from set_config('lock_timeout', @patience, true)
			on conflict (scope, key) do update
			   set fingerprint = excluded.fingerprint, attempt = excluded.attempt, state = 'running', status = 0, header = '{}',
			       body = '', lease_until = excluded.lease_until, expires_at = excluded.expires_at
			 where i.expires_at <= clock_timestamp() or i.attempt = excluded.attempt
			    or (i.state = 'running' and i.lease_until <= clock_timestamp() and i.fingerprint = excluded.fingerprint)
			returning true`, postgres.Strict{
			"scope": id.scope, "key": id.key, "fingerprint": id.fingerprint, "attempt": id.attempt, "lease": keyLease.Seconds(), "life": keyLife.Seconds(),
			"patience": postgres.LockTimeout,
		}).Scan(&ours)
		if err == nil {
			return nil, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, fmt.Errorf("claim idempotency key: %w", err)
		}
		first, err := id.first(ctx, db)
		if !errors.Is(err, pgx.ErrNoRows) { // else it was given up in between
			return first, err
		}
	}
}

// first reads what is known of the request that has the key.
func (id *identity) first(ctx context.Context, db postgres.DB) (*kept, error) {
	rows, err := db.Query(ctx, `
		select fingerprint = @fingerprint as same, state, status, header, body
		  from agent_idempotency where scope = @scope and key = @key`,
		postgres.Strict{"fingerprint": id.fingerprint, "scope": id.scope, "key": id.key})
	if err != nil {
		return nil, fmt.Errorf("read idempotency key: %w", err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[kept])
	if err != nil {
		return nil, fmt.Errorf("read idempotency key: %w", err)
	}
	return got, nil
}

func (id *identity) renew(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `
		update agent_idempotency set lease_until = clock_timestamp() + make_interval(secs => @lease)
		 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`,
		postgres.Strict{"lease": keyLease.Seconds(), "scope": id.scope, "key": id.key, "attempt": id.attempt})
	return err
}

// settlement is what becomes of a key: the answer that is kept under it, or nothing when state is empty.
type settlement struct {
	state  string
	status int
	header map[string]string
	body   []byte
}

// settlementOf gives the key up when the answer does not settle the request.
func settlementOf(held *holding, whole bool) settlement {
	switch {
	case !whole && !held.through, !final(held.code()):
		return settlement{}
	case held.through:
		return settlement{"unkept", held.code(), held.headers(), held.kept()}
	}
	return settlement{"answered", held.code(), held.headers(), held.kept()}
}

// settle keeps the answer, or gives the key up. An attempt whose lease was lost to another changes nothing.
func (id *identity) settle(ctx context.Context, db postgres.DB, as settlement) error {
	if as.state == "" {
		_, err := db.Exec(ctx, `
			delete from agent_idempotency
			 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`,
			postgres.Strict{"scope": id.scope, "key": id.key, "attempt": id.attempt})
		return err
	}
	_, err := db.Exec(ctx, `
		update agent_idempotency set state = @state, status = @status, header = @header, body = @body
		 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`, postgres.Strict{
		"state": as.state, "status": as.status, "header": as.header, "body": as.body,
		"scope": id.scope, "key": id.key, "attempt": id.attempt,
	})
	return err
}

// final reports an answer that would be the same the next time.
func final(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return status < http.StatusInternalServerError
}

// holding keeps an answer back until it is complete, so that it can be stored first. One that turns out to
// be a stream, or too large to keep, goes through.
type holding struct {
	http.ResponseWriter
	status  int
	body    bytes.Buffer
	through bool
}

func (w *holding) WriteHeader(status int) {
	switch {
	case status < http.StatusOK:
		w.ResponseWriter.WriteHeader(status)
	case w.status == 0:
		w.status = status
		if kind, _, err := mime.ParseMediaType(w.Header().Get("Content-Type")); err == nil && kind == "text/event-stream" {
			w.letThrough()
		}
	}
}

func (w *holding) Write(b []byte) (int, error) {
	w.WriteHeader(w.code())
	if !w.through && w.body.Len()+len(b) > maxKept {
		w.letThrough()
	}
	if w.through {
		return w.ResponseWriter.Write(b)
	}
	return w.body.Write(b)
}

// letThrough sends what was held back; from now on nothing is.
func (w *holding) letThrough() {
	if !w.through {
		w.through = true
		w.push()
	}
}

// push writes what was held back. A client that is gone shows at the next write.
func (w *holding) push() {
	w.ResponseWriter.WriteHeader(w.code())
	if w.body.Len() > 0 {
		_, _ = w.ResponseWriter.Write(w.body.Bytes())
	}
}

// send is the end of an answer that was held back.
func (w *holding) send() {
	if !w.through {
		w.push()
	}
}

// Flush is for handlers that ask for an http.Flusher. Whoever flushes streams.
func (w *holding) Flush() { _ = w.FlushError() } // a client that is gone shows at the next write

func (w *holding) FlushError() error {
	w.WriteHeader(w.code())
	w.letThrough()
	return http.NewResponseController(w.ResponseWriter).Flush()
}

// Unwrap lets http.ResponseController reach the connection.
func (w *holding) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// code is the status of the answer, which is 200 when the handler does not say.
func (w *holding) code() int { return cmp.Or(w.status, http.StatusOK) }

// kept is the body to store.
func (w *holding) kept() []byte {
	if w.through || w.body.Len() == 0 {
		return []byte{}
	}
	return w.body.Bytes()
}

// headers are those that belong to an answer and not to its connection.
func (w *holding) headers() map[string]string {
	list := map[string]string{}
	for _, name := range []string{"Content-Type", "Location", "X-Trace-Id", "X-Thread-Id", "X-Request-Id", "ETag"} {
		if v := w.Header().Get(name); v != "" {
			list[name] = v
		}
	}
	return list
}

const (
	// maxUnsettled is how many attempts are remembered; one more is left to its lease.
	maxUnsettled = 1000
	// settlePause is the first pause before the database is told again; it doubles up to maxSettlePause.
	settlePause    = 50 * time.Millisecond
	maxSettlePause = 2 * time.Second
)

// unsettled are attempts that are over, and of which the database could not be told: until their leases end, their
// keys would be in the way of the same requests sent again, here and at other processes. Whoever comes next with a
// key tells it, and a goroutine does as soon as the database is back. The goroutine has ended when nothing is left to
// tell.
type unsettled struct {
	db   postgres.DB
	stop <-chan struct{} // ends the goroutine; nil is never

	telling  chan struct{} // holds a token while somebody tells
	mu       sync.Mutex
	attempts []attempted
	running  bool // the goroutine
}

// attempted is an attempt that is over, and what becomes of its key.
type attempted struct {
	id    *identity
	as    settlement
	until time.Time // when its lease has ended
}

func newUnsettled(db postgres.DB, stop <-chan struct{}) *unsettled {
	return &unsettled{db: db, stop: stop, telling: make(chan struct{}, 1)}
}

func (u *unsettled) add(id *identity, as settlement) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.attempts) >= maxUnsettled {
		return
	}
	u.attempts = append(u.attempts, attempted{id, as, time.Now().Add(keyLease)})
	if !u.running {
		u.running = true
		go u.run()
	}
}

// run tells until nothing is left.
func (u *unsettled) run() {
	pause := settlePause
	for {
		select {
		case <-u.stop:
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, maxSettlePause)
		ctx, cancel := context.WithTimeout(context.Background(), settleLimit)
		u.settle(ctx)
		cancel()
		u.mu.Lock()
		u.running = len(u.attempts) > 0
		left := u.running
		u.mu.Unlock()
		if !left {
			return
		}
	}
}

// left are the attempts whose leases have not ended.
func (u *unsettled) left() []attempted {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.attempts = slices.DeleteFunc(u.attempts, func(a attempted) bool { return time.Now().After(a.until) })
	return slices.Clone(u.attempts)
}

// settle tells the database of them, as far as it can be told. Who comes while another tells waits for that.
func (u *unsettled) settle(ctx context.Context) {
	if len(u.left()) == 0 {
		return
	}
	select {
	case u.telling <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-u.telling }()
	for _, a := range u.left() {
		if postgres.Again(ctx, func() error { return a.id.settle(ctx, u.db, a.as) }) != nil {
			return
		}
		u.mu.Lock()
		u.attempts = slices.DeleteFunc(u.attempts, func(other attempted) bool { return other.id == a.id })
		u.mu.Unlock()
	}
}

// onceMore does what is an effect of its Idempotency-Key, and says what came of it by its id. That may be what the
// key did on another day, as rows live longer than keys: then the key is free again, and do is called with one made
// of both.
func onceMore(ctx context.Context, db postgres.DB, key string, do func(key string) (id string, err error)) error {
	for next := key; ; {
		id, err := do(next)
		if err != nil || key == "" {
			return err
		}
		old, err := beyondKeys(ctx, db, id)
		if err != nil || !old {
			return err
		}
		next = key + " after " + id
	}
}

// beyondKeys reports whether a row is older than keys are kept, by the time in its id, a UUID of version 7. The
// database's clock decides; it is asked only about what is not new by any clock.
func beyondKeys(ctx context.Context, db postgres.DB, id string) (old bool, err error) {
	stamp, _, _ := strings.Cut(strings.Replace(id, "-", "", 1), "-")
	milliseconds, err := strconv.ParseInt(stamp, 16, 64)
	if err != nil {
		return false, fmt.Errorf("read time of id %q: %w", id, err)
	}
	if time.Since(time.UnixMilli(milliseconds)) < keyLife/2 {
		return false, nil
	}
	err = db.QueryRow(ctx, `select @id::uuid < lanekeeper.agent_uuid7_floor(clock_timestamp() - make_interval(secs => @life))`,
		postgres.Strict{"id": id, "life": keyLife.Seconds()}).Scan(&old)
	if err != nil {
		return false, fmt.Errorf("look at the age of %s: %w", id, err)
	}
	return old, nil
}
