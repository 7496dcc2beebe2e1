package webhook

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

const (
	defaultPage = 50
	maxPage     = 500
	maxShown    = 16 << 10
)

var uuidRegexp = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// Page is a page of deliveries, newest first.
type Page struct {
	Items      []webhooks.Delivery `json:"items"`
	NextCursor *string             `json:"next_cursor"` // null after the last one
}

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

// Deliveries serves GET /v1/webhooks/deliveries?endpoint=&status=&limit=&cursor=.
func (s *Surface) Deliveries() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		f, err := filter(r.URL.RawQuery)
		if err != nil {
			problem.Write(w, r, err, "", s.Logger)
			return
		}
		limit := f.Limit
		f.Limit = limit + 1 // the additional row shows that another page exists
		got, err := webhooks.List(r.Context(), s.Pool, f)
		if err != nil {
			problem.Write(w, r, err, "", s.Logger)
			return
		}
		page := Page{Items: got}
		if len(got) > limit {
			page.Items = got[:limit]
			next := base64.RawURLEncoding.EncodeToString([]byte("deliveries\n" + got[limit-1].ID))
			page.NextCursor = &next
		}
		s.writeJSON(w, r, http.StatusOK, page)
	})
}

// filter parses the query and rejects unknown parameters.
func filter(raw string) (webhooks.Filter, error) {
	f := webhooks.Filter{Limit: defaultPage}
	values, err := url.ParseQuery(raw)
	if err != nil {
		return f, problem.BadParameter("malformed query: %s", err)
	}
	for name, all := range values {
		value := all[0]
		switch {
		case len(all) > 1 || value == "":
			return f, problem.BadParameter("parameter %.60q is empty or given twice", name)
		case !postgres.IsText(value):
			return f, problem.BadParameter("parameter %.60q has a NUL or is not UTF-8", name)
		case name == "endpoint":
			f.Endpoint = value
		case name == "status":
			if f.Status = value; !slices.Contains(webhooks.Statuses(), value) {
				return f, problem.BadParameter("parameter status is %.60q; it can be %s", value,
					strings.Join(webhooks.Statuses(), ", "))
			}
		case name == "limit":
			if f.Limit, err = strconv.Atoi(value); err != nil || f.Limit < 1 || f.Limit > maxPage {
				return f, problem.BadParameter("parameter limit is %.60q; it can be 1 to %d", value, maxPage)
			}
		case name == "cursor":
			key, err := base64.RawURLEncoding.DecodeString(value)
			id, valid := strings.CutPrefix(string(key), "deliveries\n")
			if err != nil || !valid || !uuidRegexp.MatchString(id) {
				return f, problem.BadParameter("parameter cursor is not a cursor of this listing")
			}
			f.Before = id
		default:
			return f, problem.BadParameter("there is no parameter %.60q here; this route takes endpoint, status, limit, cursor", name)
		}
	}
	return f, nil
}

// Delivery serves GET /v1/webhooks/deliveries/{id}.
func (s *Surface) Delivery() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		shown, err := s.readShown(r)
		if err != nil {
			problem.Write(w, r, toProblem(err), "", s.Logger)
			return
		}
		w.Header().Set("X-Trace-Id", shown.LastTraceID)
		s.writeJSON(w, r, http.StatusOK, shown)
	})
}

func (s *Surface) readShown(r *http.Request) (Shown, error) {
	id, err := pathID(r)
	if err != nil {
		return Shown{}, err
	}
	d, err := webhooks.Get(r.Context(), s.Pool, id)
	if err != nil {
		return Shown{}, err
	}
	return Show(r.Context(), s.Pool, d)
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
		if err != nil {
			problem.Write(w, r, toProblem(err), "", s.Logger)
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

// toProblem maps this package's errors to statuses.
func toProblem(err error) error {
	switch {
	case errors.Is(err, webhooks.ErrNotFound):
		return problem.New(http.StatusNotFound, "%s", err)
	case errors.Is(err, webhooks.ErrInProgress):
		return problem.New(http.StatusConflict, "%s, or was replayed since you read it", err)
	}
	return err
}
