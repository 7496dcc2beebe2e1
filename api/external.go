package api

import (
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

const (
	standardTTL = 30   // seconds
	maxBeats    = 1000 // locks of one request
	maxLockID   = 200  // bytes
	maxStep     = 500  // characters
	maxSummary  = 64 << 10
)

// locking asks for the right to run an execution.
type locking struct {
	Owner      string `json:"owner"`                 // names the worker, one process of it
	TTLSeconds *int   `json:"ttl_seconds,omitempty"` // 30 when left out
}

// locked is that right, with all that is needed to go on. Nothing in it is redacted: the worker works with it.
type locked struct {
	LockID      string                     `json:"lock_id"`
	ExpiresAt   time.Time                  `json:"expires_at"`
	Execution   executions.Execution       `json:"execution"`
	Checkpoint  *executions.Checkpoint     `json:"checkpoint"`  // the latest; null before the first
	Checkpoints map[string]json.RawMessage `json:"checkpoints"` // output by step
}

// beaten is what a heartbeat answers.
type beaten struct {
	ExpiresAt       time.Time         `json:"expires_at"`
	Status          executions.Status `json:"status"`
	CancelRequested bool              `json:"cancel_requested"`
}

// beating names the locks to prolong.
type beating struct {
	LockIDs []string `json:"lock_ids"`
}

// beats is what became of each, in their order.
type beats struct {
	Locks []beat `json:"locks"`
}

type beat struct {
	LockID          string             `json:"lock_id"`
	ExecutionID     *string            `json:"execution_id"`
	Live            bool               `json:"live"` // false: void
	ExpiresAt       *time.Time         `json:"expires_at"`
	Status          *executions.Status `json:"status"`
	CancelRequested bool               `json:"cancel_requested"`
}

// recording is a step's result.
type recording struct {
	LockID string          `json:"lock_id"`
	Step   string          `json:"step"`
	Output json.RawMessage `json:"output"`
}

// recorded says that it is kept.
type recorded struct {
	ID   string `json:"id"`
	Step string `json:"step"`
}

// releasing gives a lock back.
type releasing struct {
	Status        executions.Status `json:"status"`
	ResultSummary string            `json:"result_summary,omitempty"`
	Result        json.RawMessage   `json:"result,omitempty"`
	ErrorMessage  string            `json:"error_message,omitempty"`
	WaitingFor    string            `json:"waiting_for,omitempty"`
	WaitingKey    string            `json:"waiting_key,omitempty"`
	Timeout       json.RawMessage   `json:"timeout,omitempty"` // seconds, or text such as "24h" or "7d"
}

func (l locking) check() error {
	switch {
	case strings.TrimSpace(l.Owner) == "" || !storable(l.Owner):
		return badBody("owner is missing: name the worker, one process of it")
	case l.TTLSeconds != nil && (*l.TTLSeconds < 1 || *l.TTLSeconds > 86400):
		return badBody("ttl_seconds is %d; it can be 1 to 86400", *l.TTLSeconds)
	}
	return nil
}

func (b beating) check() error {
	if len(b.LockIDs) == 0 || len(b.LockIDs) > maxBeats {
		return badBody("lock_ids has %d locks; it can have 1 to %d", len(b.LockIDs), maxBeats)
	}
	for i, id := range b.LockIDs {
		if !lockForm(id) {
			return badBody("lock_ids[%d] is not the id of a lock", i)
		}
	}
	return nil
}

// waitStep is the name of a step that has the outcome of a wait of a worker outside.
var waitStep = regexp.MustCompile(`^wait [a-z]+ [0-9]+$`)

func (c recording) check() error {
	switch {
	case !lockForm(c.LockID):
		return badBody("lock_id is missing, or is not the id of a lock")
	case strings.TrimSpace(c.Step) == "" || len(c.Step) > 4*maxStep || !storable(c.Step):
		return badBody("step has to be 1 to %d characters of text", maxStep)
	case waitStep.MatchString(c.Step):
		return badBody("step is %.60q; steps named \"wait KIND NUMBER\" are the outcomes of waits, which nobody else writes", c.Step)
	case c.Output == nil:
		return badBody("output is missing; null is one")
	}
	return nil
}

func (r releasing) check() error {
	waiting := r.Status == executions.Waiting
	switch {
	case !slices.Contains([]executions.Status{executions.Completed, executions.Failed, executions.Waiting}, r.Status):
		return badBody("status is %.60q; it can be completed, failed or waiting", r.Status)
	case !waiting && (r.WaitingFor != "" || r.WaitingKey != "" || given(r.Timeout)):
		return badBody("waiting_for, waiting_key and timeout belong to status waiting, not %s", r.Status)
	case waiting && (r.ResultSummary != "" || given(r.Result)):
		return badBody("result_summary and result belong to the end of a run, not to status waiting")
	case r.ErrorMessage != "" && r.Status != executions.Failed:
		return badBody("error_message belongs to status failed, not %s", r.Status)
	case len(r.ResultSummary) > maxSummary || len(r.ErrorMessage) > maxSummary:
		return badBody("result_summary and error_message have at most %d bytes", maxSummary)
	case !keepable(r.ResultSummary) || !keepable(r.ErrorMessage) || !storable(r.WaitingKey):
		return badBody("result_summary, error_message or waiting_key has characters that cannot be kept")
	case waiting && r.WaitingFor == "agent" && r.WaitingKey != "" && !uuidForm.MatchString(r.WaitingKey):
		return badBody("waiting_key is %.60q; of agent it is the id of an execution", r.WaitingKey)
	}
	_, err := timeout(r.Timeout)
	return err
}

// given reports a value that is there and not null.
func given(v json.RawMessage) bool { return len(v) > 0 && string(v) != "null" }

// keepable reports text that PostgreSQL keeps: a stack trace with its tabs and escapes may be an error message.
func keepable(s string) bool { return !strings.ContainsRune(s, 0) }

// lockForm reports what could be the id of a lock.
func lockForm(id string) bool { return id != "" && len(id) <= maxLockID && storable(id) }

// timeout reads seconds, or text such as "90m", "24h" or "7d"; 0 when it is left out.
func timeout(raw json.RawMessage) (time.Duration, error) {
	if !given(raw) {
		return 0, nil
	}
	var text string
	wrong := badBody("timeout is %.60s; it is more than 0: a number of seconds, or text such as \"90m\", \"24h\" or \"7d\"", raw)
	if json.Unmarshal(raw, &text) != nil {
		seconds, err := strconv.ParseFloat(string(raw), 64)
		if err != nil || !(seconds > 0) || seconds > 1e9 {
			return 0, wrong
		}
		return time.Duration(math.Ceil(seconds * float64(time.Second))), nil
	}
	if days, is := strings.CutSuffix(text, "d"); is {
		n, err := strconv.ParseFloat(days, 64)
		if err != nil || !(n > 0) || n > 1e4 {
			return 0, wrong
		}
		return time.Duration(n * float64(24*time.Hour)), nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return 0, wrong
	}
	return d, nil
}

func (s *server) lockExecution(r request) (answer, error) {
	id, err := uuidIn(r, "an execution")
	if err != nil {
		return answer{}, err
	}
	want, ttl := r.body.(locking), standardTTL
	if want.TTLSeconds != nil {
		ttl = *want.TTLSeconds
	}
	got, err := s.engine.LockRun(r.Context(), id, want.Owner, time.Duration(ttl)*time.Second)
	if err != nil {
		return answer{}, err
	}
	l := locked{LockID: got.LockID, ExpiresAt: got.ExpiresAt, Execution: got.Execution, Checkpoints: map[string]json.RawMessage{}}
	for i, c := range got.Checkpoints {
		l.Checkpoints[c.Step] = c.Output
		l.Checkpoint = &got.Checkpoints[i]
	}
	return answer{body: l, trace: got.Execution.TraceID}, nil
}

// lockIn is the execution and the lock that the path names.
func lockIn(r request) (id, lockID string, err error) {
	if id, err = uuidIn(r, "an execution"); err != nil {
		return "", "", err
	}
	if lockID = r.PathValue("lock_id"); !lockForm(lockID) {
		return "", "", problem.New(http.StatusBadRequest, "that is not the id of a lock").Kind("malformed-id", "Malformed id")
	}
	return id, lockID, nil
}

func (s *server) beatLock(r request) (answer, error) {
	id, lockID, err := lockIn(r)
	if err != nil {
		return answer{}, err
	}
	got, err := s.engine.RenewLock(r.Context(), id, lockID)
	if err != nil {
		return answer{}, err
	}
	return answer{body: beaten{value(got.ExpiresAt), value(got.Status), got.CancelRequested}, trace: value(got.TraceID)}, nil
}

func (s *server) beatLocks(r request) (answer, error) {
	got, err := s.engine.RenewLocks(r.Context(), r.body.(beating).LockIDs)
	if err != nil {
		return answer{}, err
	}
	list := beats{Locks: make([]beat, len(got))}
	for i, b := range got {
		list.Locks[i] = beat{b.LockID, b.ExecutionID, b.Live, b.ExpiresAt, b.Status, b.CancelRequested}
	}
	return answer{body: list}, nil
}

func (s *server) recordStep(r request) (answer, error) {
	id, err := uuidIn(r, "an execution")
	if err != nil {
		return answer{}, err
	}
	c := r.body.(recording)
	traceID, anew, err := s.engine.CheckpointRun(r.Context(), id, c.LockID, c.Step, c.Output)
	if err != nil {
		return answer{}, err
	}
	got := answer{body: recorded{id, c.Step}, trace: traceID, status: http.StatusOK}
	if anew {
		got.status = http.StatusCreated
	}
	return got, nil
}

func (s *server) releaseLock(r request) (answer, error) {
	id, lockID, err := lockIn(r)
	if err != nil {
		return answer{}, err
	}
	b := r.body.(releasing)
	within, err := timeout(b.Timeout)
	if err != nil {
		return answer{}, err
	}
	if b.WaitingFor == "agent" && strings.EqualFold(b.WaitingKey, id) {
		return answer{}, badBody("waiting_key is this execution, which would wait for its own end")
	}
	if b.WaitingFor == "response" && b.WaitingKey != "" { // what is said in a thread is for those who may speak in it
		may, err := threads.MayJoin(r.Context(), s.pool, b.WaitingKey, id)
		if err == nil && !may {
			err = problem.New(http.StatusNotFound, "waiting_key: %s", threads.ErrNotFound)
		}
		if err != nil {
			return answer{}, err
		}
	}
	if !given(b.Result) {
		b.Result = nil
	}
	status, traceID, err := s.engine.UnlockRun(r.Context(), id, lockID, executions.UnlockParams{
		Status: b.Status, Summary: b.ResultSummary, Result: b.Result, Error: b.ErrorMessage, For: b.WaitingFor, Key: b.WaitingKey, Timeout: within,
	})
	if err != nil {
		return answer{}, err
	}
	return answer{body: executionStatus{id, traceID, status}, trace: traceID}, nil
}

// refusedValue turns what the database cannot keep, such as \u0000 in JSON, into a problem.
func refusedValue(err error) error {
	if refused, is := errors.AsType[*pgconn.PgError](err); is && postgres.IsCode(err, "22003", "22023", "22P02", "22P05") {
		return badBody("%s", postgres.Told(refused))
	}
	return err
}

// running is how executions are started, and how workers outside run theirs.
func (s *server) running() []route {
	return []route{
		{
			method: "POST", path: "/v1/executions", body: beginning{}, answer: executionStatus{}, status: http.StatusCreated,
			handle: s.startExecution, conflicts: true, keyed: true,
			about: "Start an execution of a flow. The flows external and external:NAME are run by a worker outside, which locks the execution. " +
				"422 for a flow that nobody knows.",
		}, {
			method: "POST", path: "/v1/executions/{id}/lock", body: locking{}, answer: locked{}, handle: s.lockExecution, conflicts: true,
			repeatable: true,
			about: "Lock an execution to run it from outside, and read its state. The same live owner gets the same lock. 409 with holder when " +
				"another has it, when the run waits, and when it has ended.",
		}, {
			method: "PUT", path: "/v1/executions/{id}/lock/{lock_id}", answer: beaten{}, handle: s.beatLock, conflicts: true,
			about: "Prolong a lock: every 15 seconds. cancel_requested says that the run was cancelled. 409 when the lock is void.",
		}, {
			method: "DELETE", path: "/v1/executions/{id}/lock/{lock_id}", body: releasing{}, answer: executionStatus{}, handle: s.releaseLock,
			conflicts: true,
			about: "Give a lock back: the run ends, or waits, and can be locked again when the wait is over. timeout is a number of seconds, or " +
				"text such as 24h or 7d.",
		}, {
			method: "PUT", path: "/v1/locks", body: beating{}, answer: beats{}, handle: s.beatLocks,
			about: "Prolong many locks at once. live is false for those that are void.",
		}, {
			method: "POST", path: "/v1/executions/{id}/checkpoints", body: recording{}, answer: recorded{}, status: http.StatusCreated,
			handle: s.recordStep, conflicts: true, again: true, repeatable: true,
			about: "Record the output of a step. 200 when it was recorded so before; 409 when with another output, and when the lock is void.",
		},
	}
}
