package webhook

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"regexp"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const maxShown = 16 << 10

var uuidRegexp = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Shown is a delivery with its redacted and truncated content.
type Shown struct {
	webhooks.Delivery
	Body        json.RawMessage `json:"body"`
	OtherBodies []OtherBody     `json:"other_bodies"` // bodies of later requests with the same id, not handled
}

// OtherBody is a different body received under the same delivery id.
type OtherBody struct {
	webhooks.Conflict
	Body json.RawMessage `json:"body"`
}

// Show reads the redacted content of a delivery.
func Show(ctx context.Context, db postgres.DB, d webhooks.Delivery) (Shown, error) {
	body, err := webhooks.Body(ctx, db, d.ID)
	if err != nil {
		return Shown{}, err
	}
	shown := Shown{Delivery: d, Body: redact.JSON(body, maxShown), OtherBodies: []OtherBody{}}
	conflicts, err := webhooks.Conflicts(ctx, db, d.ID)
	if err != nil {
		return Shown{}, err
	}
	for _, c := range conflicts {
		body, err := webhooks.ConflictBody(ctx, db, c.ID)
		if err != nil {
			return Shown{}, err
		}
		shown.OtherBodies = append(shown.OtherBodies, OtherBody{c, redact.JSON(body, maxShown)})
	}
	return shown, nil
}

// ReplayRequest is the optional body of POST /v1/webhooks/deliveries/{id}/replay.
type ReplayRequest struct {
	// Replays is the replay count that the caller saw; the request fails if it has changed.
	Replays *int `json:"replays,omitempty"`
	// Reason is kept in the audit log.
	Reason string `json:"reason,omitempty"`
}

// Replayed is the response to a replay.
type Replayed struct {
	ID          string `json:"id"`
	TraceID     string `json:"trace_id"`
	ExecutionID string `json:"execution_id"`
	Replays     int    `json:"replays"`
}

func pathID(r *http.Request) (string, error) {
	id := strings.ToLower(r.PathValue("id"))
	if !uuidRegexp.MatchString(id) {
		return "", problem.New(http.StatusBadRequest, "%.60q is not an id of a delivery",
			id).Kind("malformed-id", "Malformed id")
	}
	return id, nil
}

// ReplayDelivery serves POST /v1/webhooks/deliveries/{id}/replay. It responds with 202, or 409 while the delivery is
// processed.
func (s *Surface) ReplayDelivery() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, err := pathID(r)
		var request ReplayRequest
		if err == nil {
			request, err = readReplayRequest(w, r)
		}
		var d webhooks.Delivery
		if err == nil {
			d, err = s.Replay(r.Context(), id, request.expectedReplays(), request.Reason)
		}
		if errors.Is(err, webhooks.ErrInProgress) {
			err = problem.New(http.StatusConflict, "%s", err)
		}
		if err != nil {
			problem.Write(w, r, err, "", s.Logger)
			return
		}
		w.Header().Set("X-Trace-Id", d.LastTraceID)
		s.writeJSON(w, r, http.StatusAccepted,
			Replayed{ID: d.ID, TraceID: d.LastTraceID, ExecutionID: *d.ExecutionID, Replays: d.Replays})
	})
}

// maxReason bounds a reason in bytes.
const maxReason = 1000

func readReplayRequest(w http.ResponseWriter, r *http.Request) (request ReplayRequest, err error) {
	unknown := ""
	raw, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxShown))
	if err == nil && len(bytes.TrimSpace(raw)) > 0 {
		if err = json.Unmarshal(raw, &request); err == nil {
			unknown, err = problem.UnknownField(raw, &request)
		}
	}
	switch {
	case err != nil || unknown != "":
		return request, problem.New(http.StatusBadRequest, "the body must be {\"replays\": n, \"reason\": \"…\"}")
	case request.Replays != nil && *request.Replays < 0:
		return request, problem.New(http.StatusBadRequest,
			"replays is %d; it must be the number of replays that you read, 0 or more, or absent", *request.Replays)
	case len(request.Reason) > maxReason || strings.ContainsRune(request.Reason, 0):
		return request, problem.New(http.StatusBadRequest, "reason has at most %d bytes of text", maxReason)
	}
	return request, nil
}

// expectedReplays returns the expected number of replays, or -1 for any.
func (r ReplayRequest) expectedReplays() int {
	if r.Replays == nil {
		return -1
	}
	return *r.Replays
}
