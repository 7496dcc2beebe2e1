package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// laneRoutes returns the routes that list and break lanes.
func (s *server) laneRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/lanes", response: page[lanes.LiveLane]{}, handle: s.listLanes, params: listParams(),
			about: "Held lanes, newest grant first, then running executions, newest first.",
		}, {
			method: "POST", path: "/v1/lanes/{lane}/break", body: reasonRequest{}, response: laneBreak{},
			handle: s.breakLane, conflicts: true,
			about: "Break a lane; its holder's fencing token becomes invalid. The lane is path-escaped.",
		},
	}
}

// runPrefix begins the virtual lanes of running executions.
const runPrefix = "execution:"

type laneBreak struct {
	Lane       string `json:"lane"`
	Broken     bool   `json:"broken"`
	Holder     string `json:"holder" doc:"the former holder"`
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

func (s *server) listLanes(r request) (response, error) {
	after, err := decodeCursor("lanes", r.query["cursor"])
	if err != nil {
		return response{}, err
	}
	live, err := lanes.Live(r.Context(), s.pool)
	if err != nil {
		return response{}, err
	}
	slices.SortFunc(live, byNewestGrant)
	if after != "" {
		last, err := parseLaneCursor(after)
		if err != nil {
			return response{}, err
		}
		live = slices.DeleteFunc(live, func(l lanes.LiveLane) bool { return byNewestGrant(l, last) <= 0 })
	}
	next := ""
	if limit := r.query.limit(); len(live) > limit {
		live = live[:limit]
		last := live[limit-1]
		next = encodeCursor("lanes", strconv.FormatInt(last.FencingToken, 10)+" "+last.Lane)
	}
	return response{body: pageOf(live, next)}, nil
}

// byNewestGrant orders lanes by token, the microsecond of the grant, newest first. Then it orders executions by id,
// whose prefix is their time. Both keys are stable while the lane is held.
func byNewestGrant(a, b lanes.LiveLane) int {
	runA, runB := strings.HasPrefix(a.Lane, runPrefix), strings.HasPrefix(b.Lane, runPrefix)
	switch {
	case runA && !runB:
		return 1
	case runB && !runA:
		return -1
	case runA:
		return strings.Compare(b.Lane, a.Lane)
	}
	return cmp.Or(cmp.Compare(b.FencingToken, a.FencingToken), strings.Compare(a.Lane, b.Lane))
}

func parseLaneCursor(key string) (lanes.LiveLane, error) {
	token, lane, found := strings.Cut(key, " ")
	n, err := strconv.ParseInt(token, 10, 64)
	if err != nil || !found {
		return lanes.LiveLane{}, activity.ErrCursor
	}
	return lanes.LiveLane{Lane: lane, FencingToken: n}, nil
}

// breakLane breaks a lane and reads its record in the same transaction.
func (s *server) breakLane(r request) (response, error) {
	lane := r.PathValue("lane")
	if !isPrintableText(lane) {
		return response{}, problem.New(http.StatusBadRequest, "%.60q is not a lane name: it has control characters", lane).
			Kind("malformed-id", "Malformed id")
	}
	result := laneBreak{Lane: lane}
	err := postgres.InTx(r.Context(), s.pool, func(tx pgx.Tx) error {
		err := activity.SetActor(r.Context(), tx)
		if err != nil {
			return err
		}
		if result.Broken, err = lanes.Break(r.Context(), tx, lane, r.body.(reasonRequest).Reason); err != nil ||
			!result.Broken {
			return err
		}
		return result.loadRecord(r.Context(), tx)
	})
	switch {
	case errors.Is(err, lanes.ErrBlocked):
		return response{}, s.blockedProblem(r.Context(), lane, err)
	case err != nil:
		return response{}, err
	case !result.Broken:
		return response{}, notHeld(lane)
	}
	return response{body: result, trace: result.TraceID}, nil
}

// loadRecord fills in the activity of the break.
func (b *laneBreak) loadRecord(ctx context.Context, tx pgx.Tx) error {
	rows, _, err := activity.Recent(ctx, tx, activity.Filter{Skill: "break_lane", Lane: b.Lane, Limit: 1})
	if err != nil || len(rows) == 0 {
		return err
	}
	b.TraceID, b.ActivityID = rows[0].TraceID, rows[0].ID
	b.Holder, err = holderOf(rows[0].Input)
	return err
}

// blockedProblem explains a break that an open transaction blocks. It names the lane's holder and the transaction.
func (s *server) blockedProblem(ctx context.Context, lane string, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
	defer cancel()
	live, err := lanes.Get(ctx, s.pool, lane)
	if err != nil {
		return err
	}
	if live == nil {
		return cause
	}
	p, _ := problem.Of(cause)
	p.Holder, p.TraceID = live.LockedBy, postgres.Deref(live.TraceID)
	return p
}

func notHeld(lane string) error {
	if id, run := strings.CutPrefix(lane, runPrefix); run {
		return problem.New(http.StatusNotFound, "%s is an execution, not a lane; POST /v1/executions/%s/cancel ends it", lane,
			id)
	}
	return problem.New(http.StatusNotFound, "%s is not held", lane)
}

// holderOf reads the former holder from the input of the recorded break.
func holderOf(input json.RawMessage) (string, error) {
	var body struct {
		Holder string `json:"holder"`
	}
	if err := json.Unmarshal(input, &body); err != nil {
		return "", fmt.Errorf("read the lane's holder: %w", err)
	}
	return body.Holder, nil
}
