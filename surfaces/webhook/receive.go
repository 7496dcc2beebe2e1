package webhook

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/signature"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Receipt is the answer to a delivery.
type Receipt struct {
	TraceID    string `json:"trace_id"`
	DeliveryID string `json:"delivery_id"`
	// Conflict says that another body came under this id before: this one is kept for the admin and not handled.
	Conflict bool `json:"conflict,omitempty"`
}

// Receive is POST /webhooks/{endpoint}, for anybody: the signature says who it is. It limits the body itself; whoever
// limits it before must allow webhooks.MostMaxBytes, and asks [Surface.Expect] before it reads it.
func (s *Surface) Receive() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got, err := s.receive(w, r)
		if wait, is := errors.AsType[*credentials.Wait](err); is {
			w.Header().Set("Retry-After", strconv.Itoa(wait.Seconds()))
			err = problem.New(http.StatusTooManyRequests, "%v", wait).Kind("too-many-wrong-tries", "Too many wrong tries")
		}
		if err != nil {
			problem.Write(w, r, err, "", s.Logger)
			return
		}
		status := http.StatusOK
		if got.fresh {
			status = http.StatusAccepted
		}
		w.Header().Set("X-Trace-Id", got.TraceID)
		s.answer(w, r, status, Receipt{TraceID: got.TraceID, DeliveryID: got.DeliveryID, Conflict: got.conflict})
	})
}

// expected is what is known of a request before its body is read.
type expected struct {
	endpoint webhooks.Endpoint
	verifier signature.Verifier
}

type expectedKey struct{}

// Expect refuses a request whose body nobody need read: for an endpoint that is not there, or without what has to be in
// its header. Else it returns the request to go on with, and how many bytes its endpoint takes. The error is a
// *credentials.Wait for an address that has sent many wrong bearer tokens.
func (s *Surface) Expect(r *http.Request) (*http.Request, int64, error) {
	e, err := s.expect(r)
	if err != nil {
		return nil, 0, err
	}
	return r.WithContext(context.WithValue(r.Context(), expectedKey{}, e)), e.endpoint.Settings.MaxBytes, nil
}

func (s *Surface) expect(r *http.Request) (expected, error) {
	if known, ok := r.Context().Value(expectedKey{}).(expected); ok {
		return known, nil
	}
	e, err := webhooks.GetEndpoint(r.Context(), s.front(), r.PathValue("endpoint"))
	if errors.Is(err, webhooks.ErrNotFound) || err == nil && !e.Enabled {
		return expected{}, problem.New(http.StatusNotFound, "there is no such endpoint")
	}
	if err != nil {
		return expected{}, err
	}
	// What the header lacks is the sender's mistake, also where ours comes after it.
	if err := e.Verifier(nil).Before(r.Header, s.now()); err != nil {
		return expected{}, s.refused(r.Context(), e.Name, err)
	}
	secrets, err := webhooks.Secrets(e.Secrets, s.Getenv)
	if err != nil {
		return expected{}, s.refused(r.Context(), e.Name, err)
	}
	v := e.Verifier(secrets)
	if e.Scheme == signature.Bearer {
		err = s.guarded(r, e, secrets)
	} else {
		err = v.Before(r.Header, s.now())
	}
	if wait, is := errors.AsType[*credentials.Wait](err); is {
		s.count(e.Name, "refused")
		return expected{}, wait
	}
	if err != nil {
		return expected{}, s.refused(r.Context(), e.Name, err)
	}
	return expected{e, v}, nil
}

// guarded checks a bearer token as other secrets are checked. The error is a *credentials.Wait after many wrong ones.
func (s *Surface) guarded(r *http.Request, e webhooks.Endpoint, secrets []string) error {
	if err := webhooks.CheckTokens(e.Scheme, e.Secrets, s.Getenv); err != nil {
		return err
	}
	token, err := signature.Token(r.Header)
	if err != nil {
		return err
	}
	keys := make([]credentials.Key, len(secrets))
	for i, secret := range secrets {
		keys[i] = credentials.NewKey("", secret)
	}
	s.guardOnce.Do(func() { s.guard = credentials.NewGuard(s.Logger) })
	_, is, err := s.guard.Check(r, credentials.Hook, token, keys...)
	if err == nil && !is {
		err = fmt.Errorf("%w: the token is not one of this endpoint", signature.ErrRefused)
	}
	return err
}

// refused is what a request that is not proved to come from its sender is told. Where that is the receiver's mistake,
// such as a secret that is not set, it is a 500, and the sender tries again.
func (s *Surface) refused(ctx context.Context, endpoint string, err error) error {
	if !errors.Is(err, signature.ErrRefused) {
		s.noteRefusal(ctx, endpoint, "setup", err)
		return problem.New(http.StatusInternalServerError, "this endpoint cannot verify requests now; the log has the cause")
	}
	s.count(endpoint, "refused")
	s.noteRefusal(ctx, endpoint, "signature", err)
	return problem.New(http.StatusUnauthorized, "%s", err).Kind("bad-signature", "Bad signature")
}

func (s *Surface) answer(w http.ResponseWriter, r *http.Request, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(v); err != nil {
		s.Logger.DebugContext(r.Context(), "answer not written", "error", err)
	}
}

// received is a delivery as it is acknowledged.
type received struct {
	webhooks.Delivery
	fresh    bool // it came for the first time
	conflict bool // it came before, with another body
}

// receive is the order of things: header, limit, read, verify, parse, store, acknowledge.
func (s *Surface) receive(w http.ResponseWriter, r *http.Request) (received, error) {
	ctx := trace.WithCaller(r.Context(), r.Header.Get("Traceparent"))
	known, err := s.expect(r)
	if err != nil {
		return received{}, err
	}
	e := known.endpoint
	in := webhooks.Incoming{Header: r.Header}
	if in.Body, err = read(w, r, e.Settings.MaxBytes); err != nil {
		return received{}, err
	}
	if err := known.verifier.Verify(r.Header, in.Body, s.now()); err != nil {
		return received{}, s.refused(ctx, e.Name, err)
	}
	if in.Value, err = webhooks.Parse(in.Body, e.Settings.Format); err != nil {
		return received{}, problem.New(http.StatusBadRequest, "%s; this endpoint takes %s", err, e.Settings.Format).
			Kind("unparsable", "Unparsable body")
	}
	id, err := e.DeliveryID(in)
	if err != nil {
		return received{}, problem.New(http.StatusBadRequest, "no delivery id: %s", err).Kind("no-delivery-id", "No delivery id")
	}
	return s.store(ctx, e, id, in)
}

// front is where requests go to the database.
func (s *Surface) front() *pgxpool.Pool { return cmp.Or(s.Front, s.Pool) }

func (s *Surface) now() time.Time {
	if s.Now == nil {
		return time.Now()
	}
	return s.Now()
}

// read reads the whole body, as it is, or says what is wrong with it.
func read(w http.ResponseWriter, r *http.Request, most int64) ([]byte, error) {
	if r.ContentLength > most {
		return nil, tooLarge(most)
	}
	body, err := admission.All(w, r, most)
	large, isLarge := errors.AsType[*admission.TooLarge](err)
	switch {
	case isLarge:
		return nil, tooLarge(large.Most)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, problem.New(http.StatusRequestTimeout, "the body did not come in time")
	case err != nil:
		return nil, problem.New(http.StatusBadRequest, "the body ends too early or cannot be read").Kind("unparsable", "Unparsable body")
	}
	return body, nil
}

func tooLarge(most int64) error {
	return problem.New(http.StatusRequestEntityTooLarge, "the body is larger than the %d bytes that this endpoint takes", most)
}

// store is the transaction after which the delivery is ours: its row and the execution that handles it.
func (s *Surface) store(ctx context.Context, e webhooks.Endpoint, id string, in webhooks.Incoming) (got received, err error) {
	traceID := trace.New(trace.Webhook)
	ctx = trace.With(ctx, trace.Span{TraceID: traceID, Surface: trace.Webhook, Agent: s.Agent})
	err = s.intake.Do(ctx, s.front(), e.Name+"\x00"+id, func(tx pgx.Tx) error {
		if got.Delivery, got.fresh, err = webhooks.Insert(ctx, tx, e, id, string(traceID), in); err != nil {
			return err
		}
		if !got.fresh {
			got.conflict, err = keepConflict(ctx, tx, e, got.Delivery, in)
			return err
		}
		if _, err = s.start(ctx, tx, got.Delivery); err != nil {
			return err
		}
		return activity.Link(ctx, tx, traceID)
	})
	if err == nil && !got.fresh { // what is logged belongs to the first: a trace of this request is nowhere
		ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(got.TraceID), Surface: trace.Webhook, Agent: s.Agent})
	}
	switch {
	case err != nil:
		return received{}, err
	case got.fresh:
		s.count(e.Name, "accepted")
		s.Logger.InfoContext(ctx, "webhook received", "endpoint", e.Name, "delivery_id", id, "bytes", len(in.Body))
	case got.conflict:
		s.count(e.Name, "conflict")
		s.Logger.WarnContext(ctx, "webhook repeated with another body, not run", "endpoint", e.Name, "delivery_id", id)
	default:
		s.count(e.Name, "repeated")
		s.Logger.InfoContext(ctx, "webhook repeated, not run again", "endpoint", e.Name, "delivery_id", id)
	}
	return got, nil
}

// keepConflict keeps another body that came under the id of a delivery, with an activity under the delivery's trace.
func keepConflict(ctx context.Context, tx pgx.Tx, e webhooks.Endpoint, d webhooks.Delivery, in webhooks.Incoming) (bool, error) {
	conflict, kept, err := webhooks.StoreConflict(ctx, tx, e, d, in)
	if err != nil || !kept {
		return conflict, err
	}
	_, err = activity.Note(ctx, tx, activity.Entry{
		TraceID: d.TraceID, Skill: "webhook_conflict", Input: map[string]any{"endpoint": e.Name, "delivery_id": d.DeliveryID, "delivery": d.ID},
	}, activity.Outcome{
		Status: activity.Error, Class: "conflict", Message: "another body came under the id of this delivery; it is kept, and was not handled",
	})
	return conflict, err
}

// count tells what became of a request at an endpoint, for metrics.
func (s *Surface) count(endpoint, result string) {
	if s.Received != nil {
		s.Received(endpoint, result)
	}
}

// refusals counts the unverified requests of an endpoint since the last note.
type refusals struct {
	noted time.Time
	since int
}

const notePause = time.Minute

// noteRefusal leaves a note of an unverified request, but not of each: whoever sends them must not fill the log. The
// class is signature for the sender's mistake, and setup for ours.
func (s *Surface) noteRefusal(ctx context.Context, endpoint, class string, why error) {
	s.mu.Lock()
	if s.refusals == nil {
		s.refusals = map[string]refusals{}
	}
	seen := s.refusals[class+" "+endpoint]
	seen.since++
	due := time.Since(seen.noted) >= notePause
	count := seen.since
	if due {
		seen = refusals{noted: time.Now()}
	}
	s.refusals[class+" "+endpoint] = seen
	s.mu.Unlock()
	if !due {
		return
	}
	ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Webhook), Surface: trace.Webhook, Agent: s.Agent})
	level := slog.LevelWarn
	if class == "setup" {
		level = slog.LevelError
	}
	s.Logger.Log(ctx, level, "webhook refused", "endpoint", endpoint, "reason", why, "count", count)
	_, err := activity.Note(ctx, s.front(), activity.Entry{
		Skill: "webhook_refused", Input: map[string]any{"endpoint": endpoint, "count": count},
	}, activity.Outcome{Status: activity.Error, Class: class, Message: why.Error()})
	if err != nil {
		s.Logger.WarnContext(ctx, "refused webhook not noted", "error", err)
	}
}
