package webhook

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/admission"
	"github.com/lanekeeper/lanekeeper/internal/credentials"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/trace"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// Response is the response to a delivery.
type Response struct {
	TraceID    string `json:"trace_id"`
	DeliveryID string `json:"delivery_id"`
	// Conflict reports that an earlier delivery has this id and another body. The new body is stored, not processed.
	Conflict bool `json:"conflict,omitempty"`
}

// Receive serves POST /webhooks/{endpoint}. The signature authenticates the sender. The caller runs [Surface.Expect]
// before it reads the body, and allows webhooks.MaxBodyBytes.
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
		if got.challenge != "" {
			s.writeJSON(w, r, http.StatusOK, map[string]string{"challenge": got.challenge})
			return
		}
		status := http.StatusOK
		if got.isNew {
			status = http.StatusAccepted
		}
		w.Header().Set("X-Trace-Id", got.TraceID)
		s.writeJSON(w, r, status, Response{TraceID: got.TraceID, DeliveryID: got.DeliveryID, Conflict: got.conflict})
	})
}

func (s *Surface) writeJSON(w http.ResponseWriter, r *http.Request, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(v); err != nil {
		s.Logger.DebugContext(r.Context(), "response not written", "error", err)
	}
}

type storedDelivery struct {
	webhooks.Delivery
	isNew     bool   // first delivery with this id
	conflict  bool   // an earlier delivery has this id and another body
	challenge string // response to a sender that verifies the address; nothing was stored
}

// receive checks the header, reads, verifies and parses the body, and stores the delivery.
func (s *Surface) receive(w http.ResponseWriter, r *http.Request) (storedDelivery, error) {
	ctx := trace.WithCaller(r.Context(), r.Header.Get("Traceparent"))
	known, err := s.expect(r)
	if err != nil {
		return storedDelivery{}, err
	}
	e := known.endpoint
	in := webhooks.Incoming{Header: r.Header}
	if in.Body, err = readBody(w, r, e.Settings.MaxBytes); err != nil {
		return storedDelivery{}, err
	}
	if err := known.verifier.Verify(r.Header, in.Body, s.now()); err != nil {
		return storedDelivery{}, s.rejectionError(ctx, e.Name, known.cause(err))
	}
	if in.Value, err = webhooks.Parse(in.Body, e.Settings.Format); err != nil {
		hint := "expected " + e.Settings.Format
		if strings.HasPrefix(r.Header.Get("Content-Type"), "application/x-www-form-urlencoded") {
			hint = "it is a form; choose the content type application/json at the sender, or format: text for the endpoint"
		}
		return storedDelivery{}, problem.New(http.StatusBadRequest, "%s; %s", err, hint).
			Kind("unparsable", "Unparsable body")
	}
	if text, is := slackChallenge(e, in.Value); is {
		return storedDelivery{challenge: text}, nil
	}
	id, err := e.DeliveryID(in)
	if err != nil {
		return storedDelivery{}, problem.New(http.StatusBadRequest, "no delivery id: %s", err).
			Kind("no-delivery-id", "No delivery id")
	}
	return s.store(ctx, e, id, in)
}

func (s *Surface) requestPool() *pgxpool.Pool { return cmp.Or(s.RequestPool, s.Pool) }

func (s *Surface) now() time.Time {
	if s.Now == nil {
		return time.Now()
	}
	return s.Now()
}

// readBody reads the body, up to maxBytes.
func readBody(w http.ResponseWriter, r *http.Request, maxBytes int64) ([]byte, error) {
	if r.ContentLength > maxBytes {
		return nil, tooLarge(maxBytes)
	}
	body, err := admission.All(w, r, maxBytes)
	large, isLarge := errors.AsType[*admission.TooLarge](err)
	switch {
	case isLarge:
		return nil, tooLarge(large.MaxBytes)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, problem.New(http.StatusRequestTimeout, "timed out reading the body")
	case err != nil:
		return nil, problem.New(http.StatusBadRequest, "the body is truncated or cannot be read").
			Kind("unparsable", "Unparsable body")
	}
	return body, nil
}

func tooLarge(maxBytes int64) error {
	return problem.New(http.StatusRequestEntityTooLarge, "the body exceeds this endpoint's limit of %d bytes", maxBytes)
}

// store inserts the delivery and its execution in one transaction.
func (s *Surface) store(
	ctx context.Context, e webhooks.Endpoint, id string, in webhooks.Incoming,
) (stored storedDelivery, err error) {
	traceID := trace.New(trace.Webhook)
	ctx = trace.With(ctx, trace.Span{TraceID: traceID, Surface: trace.Webhook, Agent: s.Agent})
	err = s.deliveryTx.Do(ctx, s.requestPool(), e.Name+"\x00"+id, func(tx pgx.Tx) error {
		if stored.Delivery, stored.isNew, err = webhooks.Insert(ctx, tx, e, id, string(traceID), in); err != nil {
			return err
		}
		if !stored.isNew {
			stored.conflict, err = storeConflict(ctx, tx, e, stored.Delivery, in)
			return err
		}
		if _, err = s.start(ctx, tx, stored.Delivery); err != nil {
			return err
		}
		return activity.Link(ctx, tx, traceID)
	})
	if err == nil && !stored.isNew { // log under the first delivery's trace, because this request's trace is not stored
		ctx = trace.With(ctx, trace.Span{TraceID: trace.ID(stored.TraceID), Surface: trace.Webhook, Agent: s.Agent})
	}
	switch {
	case err != nil:
		return storedDelivery{}, err
	case stored.isNew:
		s.report(e.Name, "accepted")
		s.Logger.InfoContext(ctx, "webhook received", "endpoint", e.Name, "delivery_id", id, "bytes", len(in.Body))
	case stored.conflict:
		s.report(e.Name, "conflict")
		s.Logger.WarnContext(ctx, "webhook repeated with another body, not run", "endpoint", e.Name, "delivery_id", id)
	default:
		s.report(e.Name, "repeated")
		s.Logger.InfoContext(ctx, "webhook repeated, not processed again", "endpoint", e.Name, "delivery_id", id)
	}
	return stored, nil
}

// storeConflict stores a different body of a known delivery, with an activity under the delivery's trace.
func storeConflict(
	ctx context.Context, tx pgx.Tx, e webhooks.Endpoint, d webhooks.Delivery, in webhooks.Incoming,
) (bool, error) {
	conflict, kept, err := webhooks.StoreConflict(ctx, tx, e, d, in)
	if err != nil || !kept {
		return conflict, err
	}
	_, err = activity.Note(ctx, tx, activity.Entry{
		TraceID: d.TraceID, Skill: "webhook_conflict",
		Input: map[string]any{"endpoint": e.Name, "delivery_id": d.DeliveryID, "delivery": d.ID},
	}, activity.Outcome{
		Status: activity.Error, Class: "conflict",
		Message: "a later request has this delivery id and another body; it was stored, not processed",
	})
	return conflict, err
}

// report counts a request for metrics.
func (s *Surface) report(endpoint, result string) {
	if s.Received != nil {
		s.Received(endpoint, result)
	}
}
