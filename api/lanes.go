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
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/lanes"
)

// runPrefix begins the lane of an execution that is run now. Such lanes are no rows of their own.
const runPrefix = "execution:"

// laneBreak says that a lane was taken away, and where that is recorded.
type laneBreak struct {
	Lane       string `json:"lane"`
	Broken     bool   `json:"broken"`
	Holder     string `json:"holder"` // who had it
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

func (s *server) listLanes(r request) (answer, error) {
	after, err := unseal("lanes", r.query["cursor"])
	if err != nil {
		return answer{}, err
	}
	live, err := lanes.Live(r.Context(), s.pool)
	if err != nil {
		return answer{}, err
	}
	slices.SortFunc(live, newestGrant)
	if after != "" {
		last, err := readMark(after)
		if err != nil {
			return answer{}, err
		}
		live = slices.DeleteFunc(live, func(l lanes.LiveLane) bool { return newestGrant(l, last) <= 0 })
	}
	next := ""
	if limit := r.query.limit(); len(live) > limit {
		live = live[:limit]
		next = seal("lanes", mark(live[limit-1]))
	}
	return answer{body: pageOf(live, next)}, nil
}

// newestGrant orders lanes by token, which is the microsecond of the grant, newest first; then the runs
// by their execution's id, which begins with its time, newest first. Neither key changes while the lane is
// held.
func newestGrant(a, b lanes.LiveLane) int {
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

// mark is a lane's place in that order.
func mark(l lanes.LiveLane) string { return strconv.FormatInt(l.FencingToken, 10) + " " + l.Lane }

func readMark(key string) (lanes.LiveLane, error) {
	token, lane, found := strings.Cut(key, " ")
	n, err := strconv.ParseInt(token, 10, 64)
	if err != nil || !found {
		return lanes.LiveLane{}, activity.ErrCursor
	}
	return lanes.LiveLane{Lane: lane, FencingToken: n}, nil
}

// breakLane breaks a lane and reads back, in the same transaction, what was recorded about it.
func (s *server) breakLane(r request) (answer, error) {
	lane := r.PathValue("lane")
	if !storable(lane) {
		return answer{}, problem.New(http.StatusBadRequest, "%.60q is not a lane: it has control characters", lane).
			Kind("malformed-id", "Malformed id")
	}
	result := laneBreak{Lane: lane}
	err := postgres.InTx(r.Context(), s.pool, func(tx pgx.Tx) error {
		var err error
		if result.Broken, err = lanes.Break(r.Context(), tx, lane, r.body.(because).Reason); err != nil || !result.Broken {
			return err
		}
		return result.recorded(r.Context(), tx)
	})
	switch {
	case errors.Is(err, lanes.ErrBlocked):
		return answer{}, s.inUse(r.Context(), lane, err)
	case err != nil:
		return answer{}, err
	case !result.Broken:
		return answer{}, notHeld(lane)
	}
	return answer{body: result, trace: result.TraceID}, nil
}

// recorded fills in what the activity of the break says.
func (b *laneBreak) recorded(ctx context.Context, tx pgx.Tx) error {
	rows, _, err := activity.Recent(ctx, tx, activity.Filter{Skill: "break_lane", Lane: b.Lane, Limit: 1})
	if err != nil || len(rows) == 0 {
		return err
	}
	b.TraceID, b.ActivityID = rows[0].TraceID, rows[0].ID
	b.Holder, err = holderIn(rows[0].Input)
	return err
}

// inUse answers for a break that an open transaction holds up, such as a protected write of the holder: who holds the
// lane, and which transaction is in the way.
func (s *server) inUse(ctx context.Context, lane string, cause error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeLimit)
	defer cancel()
	live, err := lanes.Live(ctx, s.pool)
	if err != nil {
		return err
	}
	i := slices.IndexFunc(live, func(l lanes.LiveLane) bool { return l.Lane == lane })
	if i < 0 {
		return cause
	}
	p, _ := problem.Of(cause)
	p.Holder, p.TraceID = live[i].LockedBy, value(live[i].TraceID)
	return p
}

func notHeld(lane string) error {
	if id, run := strings.CutPrefix(lane, runPrefix); run {
		return problem.New(http.StatusNotFound, "%s is not a lane but a run; POST /v1/executions/%s/cancel ends it", lane, id)
	}
	return problem.New(http.StatusNotFound, "nobody holds %s", lane)
}

// holderIn reads who held a lane from the input of the activity that broke it.
func holderIn(input json.RawMessage) (string, error) {
	var said struct {
		Holder string `json:"holder"`
	}
	if err := json.Unmarshal(input, &said); err != nil {
		return "", fmt.Errorf("read who held the lane: %w", err)
	}
	return said.Holder, nil
}

// pausing is the lever that stops everything the agent does by itself.
func (s *server) pausing() []route {
	return []route{
		{
			method: "GET", path: "/v1/pause", answer: executions.Pause{}, handle: s.getPause,
			about: "Whether autonomous work is paused, since when, by whom and why.",
		}, {
			method: "POST", path: "/v1/pause", body: because{}, answer: executions.PauseChange{}, handle: s.pauseAll, repeatable: true,
			about: "Pause autonomous work, everywhere: nothing of it begins, what runs stops before its next step, due times are recorded as " +
				"skipped, and what arrives is kept. operate and chat go on. changed is false when it was paused; then the pause is answered that is on.",
		}, {
			method: "POST", path: "/v1/resume", body: because{}, answer: executions.PauseChange{}, handle: s.resumeAll, repeatable: true,
			about: "End the pause: what is ready goes on at once. The answer tells of the pause that was; changed is false when there was none.",
		},
	}
}

func (s *server) getPause(r request) (answer, error) {
	p, err := executions.CurrentPause(r.Context(), s.pool)
	return answer{body: p, trace: p.TraceID}, err
}

func (s *server) pauseAll(r request) (answer, error) {
	got, err := executions.PauseAll(r.Context(), s.pool, admin, r.body.(because).Reason)
	return answer{body: got, trace: got.TraceID}, err
}

func (s *server) resumeAll(r request) (answer, error) {
	got, err := executions.ResumeAll(r.Context(), s.pool, admin, r.body.(because).Reason)
	return answer{body: got, trace: got.TraceID}, err
}
