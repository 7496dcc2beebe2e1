package api

import (
	"cmp"
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// workerRoutes returns the routes of external workers.
func (s *server) workerRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/executions/{id}/lock", body: lockRequest{}, response: lockResponse{},
			handle: s.lockExecution, conflicts: true, safeToRetry: true,
			about: "Lock an execution to run it externally, and read its state. The same live owner gets the same " +
				"lock. 409 with holder if it is locked, waiting or ended.",
		}, {
			method: "PUT", path: "/v1/executions/{id}/lock/{lock_id}", response: heartbeatResponse{},
			handle: s.heartbeatLock, conflicts: true,
			about: "Renew a lock, every 15 seconds. cancel_requested reports a cancel. 409 if the lock is void.",
		}, {
			method: "DELETE", path: "/v1/executions/{id}/lock/{lock_id}", body: releaseRequest{}, response: executionStatus{},
			handle: s.releaseLock, conflicts: true,
			about: "Release a lock: the execution ends or waits, and can be locked again after the wait. timeout " +
				"is a number of seconds, or text such as 24h or 7d.",
		}, {
			method: "POST", path: "/v1/executions/{id}/lock/{lock_id}", body: releaseRequest{}, response: executionStatus{},
			handle: s.releaseLock, conflicts: true, safeToRetry: true,
			about: "Release a lock, as DELETE does: some proxies remove the body of a DELETE.",
		}, {
			method: "POST", path: "/v1/locks", body: claimRequest{}, response: claimResponse{},
			handle: s.claimExecutions, safeToRetry: true,
			about: "Lock ready executions of external flows, and read their state. Without one it waits for the first, for " +
				"wait_seconds. lock_ids are the locks that the worker has; others of the owner are returned again.",
		}, {
			method: "PUT", path: "/v1/locks", body: heartbeatsRequest{}, response: heartbeatsResponse{},
			handle: s.heartbeatLocks,
			about:  "Renew many locks at once. live is false for void locks.",
		}, {
			method: "POST", path: "/v1/executions/{id}/checkpoints", body: checkpointRequest{}, response: checkpointResponse{},
			status: http.StatusCreated, handle: s.checkpoint, conflicts: true, alreadyDone: true, safeToRetry: true,
			about: "Checkpoint the output of a step. 200 if the same output was recorded before; 409 for a different output " +
				"or a void lock.",
		},
	}
}

// lockRequest requests the lock on an execution.
type lockRequest struct {
	Owner      string `json:"owner" doc:"one process of a worker"`
	TTLSeconds *int   `json:"ttl_seconds,omitempty" doc:"default 30"`
}

// maxOwner bounds an owner in characters, as the SQL functions do.
const maxOwner = 255

func (l lockRequest) check() error {
	switch {
	case strings.TrimSpace(l.Owner) == "" || !isPrintableText(l.Owner):
		return problem.BadBody("owner is missing or has control characters: name one process of the worker")
	case utf8.RuneCountInString(l.Owner) > maxOwner:
		return problem.BadBody("owner is longer than %d characters", maxOwner)
	case l.TTLSeconds != nil && (*l.TTLSeconds < 1 || *l.TTLSeconds > 86400):
		return problem.BadBody("ttl_seconds is %d; use 1 to 86400", *l.TTLSeconds)
	}
	return nil
}

// lockResponse holds the lock and the full, unredacted state, because the worker needs it.
type lockResponse struct {
	LockID      string                     `json:"lock_id"`
	ExpiresAt   time.Time                  `json:"expires_at"`
	Execution   executions.Execution       `json:"execution"`
	Checkpoint  *executions.Checkpoint     `json:"checkpoint" doc:"the latest; null before the first"`
	Checkpoints map[string]json.RawMessage `json:"checkpoints" doc:"output by step"`
}

func lockOf(lock executions.RunLock) lockResponse {
	l := lockResponse{
		LockID: lock.LockID, ExpiresAt: lock.ExpiresAt, Execution: lock.Execution,
		Checkpoints: map[string]json.RawMessage{},
	}
	for i, c := range lock.Checkpoints {
		l.Checkpoints[c.Step] = c.Output
		l.Checkpoint = &lock.Checkpoints[i]
	}
	return l
}

func (s *server) lockExecution(r request) (response, error) {
	id, err := pathUUID(r, "an execution")
	if err != nil {
		return response{}, err
	}
	if err := s.mayWork(r.Context(), id); err != nil {
		return response{}, err
	}
	want := r.body.(lockRequest)
	lock, err := s.engine.LockRun(r.Context(), id, want.Owner, ttl(want.TTLSeconds))
	if err != nil {
		return response{}, err
	}
	return response{body: lockOf(lock), trace: lock.Execution.TraceID}, nil
}

// defaultTTL is the lease of a lock without ttl_seconds, in seconds.
const defaultTTL = 30

func ttl(seconds *int) time.Duration {
	return time.Duration(cmp.Or(postgres.Deref(seconds), defaultTTL)) * time.Second
}

// claimRequest requests locks on executions of flows.
type claimRequest struct {
	Flows       []string `json:"flows" doc:"external, or external:NAME"`
	Owner       string   `json:"owner"`
	TTLSeconds  *int     `json:"ttl_seconds,omitempty" doc:"default 30"`
	Max         *int     `json:"max,omitempty" doc:"locks; default 1"`
	WaitSeconds float64  `json:"wait_seconds,omitempty" doc:"wait for the first execution; default 0, at most 30"`
	LockIDs     []string `json:"lock_ids,omitempty" doc:"the worker's locks; the response repeats other locks of the owner"`
}

const (
	maxClaimFlows = 50
	maxClaimWait  = 30 // seconds; less than the deadline of a request
)

func (c claimRequest) check() error {
	if err := (lockRequest{c.Owner, c.TTLSeconds}).check(); err != nil {
		return err
	}
	switch {
	case len(c.Flows) == 0 || len(c.Flows) > maxClaimFlows:
		return problem.BadBody("flows has %d names; use 1 to %d", len(c.Flows), maxClaimFlows)
	case c.Max != nil && (*c.Max < 1 || *c.Max > executions.MaxClaim):
		return problem.BadBody("max is %d; use 1 to %d", *c.Max, executions.MaxClaim)
	case !(c.WaitSeconds >= 0 && c.WaitSeconds <= maxClaimWait):
		return problem.BadBody("wait_seconds is %g; use 0 to %d", c.WaitSeconds, maxClaimWait)
	case len(c.LockIDs) > maxHeartbeats:
		return problem.BadBody("lock_ids has %d locks; use at most %d", len(c.LockIDs), maxHeartbeats)
	}
	for _, flow := range c.Flows {
		if !executions.CanClaim(flow) {
			return problem.BadBody("flows has %.100q; name external flows, such as external:sum", flow)
		}
	}
	return heartbeatsRequest{c.LockIDs}.checkIDs()
}

// claimResponse holds the locks; none without a ready execution in time.
type claimResponse struct {
	Locks []lockResponse `json:"locks"`
}

// claimExecutions locks ready executions of some flows, or waits for one. A shutdown ends the wait.
func (s *server) claimExecutions(r request) (response, error) {
	c := r.body.(claimRequest)
	if err := mayWorkOn(principals.From(r.Context()), c.Flows); err != nil {
		return response{}, err
	}
	ctx, release := withStop(r.Context(), s.stopping)
	defer release()
	known := c.LockIDs
	if known == nil {
		known = []string{}
	}
	claimed, err := s.engine.ClaimRuns(ctx, executions.ClaimParams{
		Flows: c.Flows, Owner: c.Owner, TTL: ttl(c.TTLSeconds),
		Max: cmp.Or(postgres.Deref(c.Max), 1), Known: known, Wait: time.Duration(c.WaitSeconds * float64(time.Second)),
	})
	if err != nil {
		return response{}, err
	}
	result := claimResponse{Locks: make([]lockResponse, len(claimed))}
	for i, lock := range claimed {
		result.Locks[i] = lockOf(lock)
	}
	return response{body: result}, nil
}

type heartbeatResponse struct {
	ExpiresAt       time.Time         `json:"expires_at"`
	Status          executions.Status `json:"status"`
	CancelRequested bool              `json:"cancel_requested"`
}

func (s *server) heartbeatLock(r request) (response, error) {
	id, lockID, err := s.pathLock(r)
	if err != nil {
		return response{}, err
	}
	renewal, err := s.engine.RenewLock(r.Context(), id, lockID)
	if err != nil {
		return response{}, err
	}
	return response{
		body:  heartbeatResponse{postgres.Deref(renewal.ExpiresAt), postgres.Deref(renewal.Status), renewal.CancelRequested},
		trace: postgres.Deref(renewal.TraceID),
	}, nil
}

// pathLock returns the execution and lock ids in the path, for a caller that may work on the execution.
func (s *server) pathLock(r request) (id, lockID string, err error) {
	if id, err = pathUUID(r, "an execution"); err != nil {
		return "", "", err
	}
	if lockID = r.PathValue("lock_id"); !isLockID(lockID) {
		return "", "", problem.New(http.StatusBadRequest, "malformed lock id").Kind("malformed-id", "Malformed id")
	}
	return id, lockID, s.mayWork(r.Context(), id)
}

// maxLockID bounds the id of a lock in bytes.
const maxLockID = 200

func isLockID(id string) bool { return id != "" && len(id) <= maxLockID && isPrintableText(id) }

type heartbeatsRequest struct {
	LockIDs []string `json:"lock_ids"`
}

// maxHeartbeats bounds the locks of one request.
const maxHeartbeats = 1000

func (b heartbeatsRequest) check() error {
	if len(b.LockIDs) == 0 || len(b.LockIDs) > maxHeartbeats {
		return problem.BadBody("lock_ids has %d locks; use 1 to %d", len(b.LockIDs), maxHeartbeats)
	}
	return b.checkIDs()
}

func (b heartbeatsRequest) checkIDs() error {
	for i, id := range b.LockIDs {
		if id != "" && !isLockID(id) { // an empty id is an unknown lock
			return problem.BadBody("lock_ids[%d] is not the id of a lock", i)
		}
	}
	return nil
}

// heartbeatsResponse holds the state of each lock in request order.
type heartbeatsResponse struct {
	Locks []lockState `json:"locks"`
}

type lockState struct {
	LockID          string             `json:"lock_id"`
	ExecutionID     *string            `json:"execution_id"`
	Live            bool               `json:"live" doc:"false: void"`
	ExpiresAt       *time.Time         `json:"expires_at"`
	Status          *executions.Status `json:"status"`
	CancelRequested bool               `json:"cancel_requested"`
}

func (s *server) heartbeatLocks(r request) (response, error) {
	locks := r.body.(heartbeatsRequest).LockIDs
	if err := s.mayWork(r.Context(), "", locks...); err != nil {
		return response{}, err
	}
	renewals, err := s.engine.RenewLocks(r.Context(), locks)
	if err != nil {
		return response{}, err
	}
	list := heartbeatsResponse{Locks: make([]lockState, len(renewals))}
	for i, b := range renewals {
		list.Locks[i] = lockState{b.LockID, b.ExecutionID, b.Live, b.ExpiresAt, b.Status, b.CancelRequested}
	}
	return response{body: list}, nil
}

type checkpointRequest struct {
	LockID string          `json:"lock_id"`
	Step   string          `json:"step"`
	Output json.RawMessage `json:"output"`
}

// waitStep matches the steps that record the outcomes of an external worker's waits.
var waitStep = regexp.MustCompile(`^wait [a-z]+ [0-9]+$`)

// maxStep bounds the name of a step in characters. This package counts bytes, of which a character has at most four;
// the database counts the characters.
const maxStep = 500

func (c checkpointRequest) check() error {
	switch {
	case !isLockID(c.LockID):
		return problem.BadBody("lock_id is missing or malformed")
	case strings.TrimSpace(c.Step) == "" || len(c.Step) > 4*maxStep || !isPrintableText(c.Step):
		return problem.BadBody("step must be 1 to %d characters of text", maxStep)
	case waitStep.MatchString(c.Step):
		return problem.BadBody("step is %.60q; steps named \"wait KIND NUMBER\" are reserved for the outcomes of waits",
			c.Step)
	case c.Output == nil:
		return problem.BadBody("output is missing; null is valid")
	}
	return nil
}

type checkpointResponse struct {
	ID   string `json:"id"`
	Step string `json:"step"`
}

func (s *server) checkpoint(r request) (response, error) {
	id, err := pathUUID(r, "an execution")
	if err != nil {
		return response{}, err
	}
	if err := s.mayWork(r.Context(), id); err != nil {
		return response{}, err
	}
	c := r.body.(checkpointRequest)
	traceID, isNew, err := s.engine.CheckpointRun(r.Context(), id, c.LockID, c.Step, c.Output)
	if err != nil {
		return response{}, err
	}
	result := response{body: checkpointResponse{id, c.Step}, trace: traceID, status: http.StatusOK}
	if isNew {
		result.status = http.StatusCreated
	}
	return result, nil
}

type releaseRequest struct {
	Status        executions.Status `json:"status"`
	ResultSummary string            `json:"result_summary,omitempty"`
	Result        json.RawMessage   `json:"result,omitempty"`
	ErrorMessage  string            `json:"error_message,omitempty"`
	WaitingFor    string            `json:"waiting_for,omitempty"`
	WaitingKey    string            `json:"waiting_key,omitempty"`
	Timeout       json.RawMessage   `json:"timeout,omitempty" doc:"seconds, or text such as 24h or 7d"`
}

// releaseStatuses are the statuses that a release may set.
var releaseStatuses = []string{string(executions.Completed), string(executions.Failed), string(executions.Waiting)}

// maxSummary bounds the summary of a result, and an error's message, in bytes.
const maxSummary = 64 << 10

func (r releaseRequest) check() error {
	waiting := r.Status == executions.Waiting
	switch {
	case !slices.Contains(releaseStatuses, string(r.Status)):
		return problem.BadBody("status is %.60q; use completed, failed or waiting", r.Status)
	case !waiting && (r.WaitingFor != "" || r.WaitingKey != "" || isSet(r.Timeout)):
		return problem.BadBody("waiting_for, waiting_key and timeout belong to status waiting, not %s", r.Status)
	case waiting && r.WaitingFor == "":
		return problem.BadBody("waiting_for is missing; use response, agent, document, signature, test, event, delay or " +
			"approval")
	case waiting && (r.ResultSummary != "" || isSet(r.Result)):
		return problem.BadBody("result_summary and result exclude status waiting")
	case r.ErrorMessage != "" && r.Status != executions.Failed:
		return problem.BadBody("error_message belongs to status failed, not %s", r.Status)
	case len(r.ResultSummary) > maxSummary || len(r.ErrorMessage) > maxSummary:
		return problem.BadBody("result_summary and error_message have at most %d bytes", maxSummary)
	case !postgres.IsText(r.ResultSummary) || !postgres.IsText(r.ErrorMessage) || !isPrintableText(r.WaitingKey):
		return problem.BadBody("result_summary, error_message or waiting_key has unstorable characters")
	case waiting && r.WaitingFor == "agent" && r.WaitingKey != "" && !uuidForm.MatchString(r.WaitingKey):
		return problem.BadBody("waiting_key is %.60q; for agent it must be the id of an execution", r.WaitingKey)
	}
	_, err := readDuration("timeout", r.Timeout)
	return err
}

// releaseLock ends a claim: the execution completes, fails or waits.
func (s *server) releaseLock(r request) (response, error) {
	id, lockID, err := s.pathLock(r)
	if err != nil {
		return response{}, err
	}
	b := r.body.(releaseRequest)
	within, err := readDuration("timeout", b.Timeout)
	if err != nil {
		return response{}, err
	}
	if b.WaitingFor == "agent" && strings.EqualFold(b.WaitingKey, id) {
		return response{}, problem.BadBody("waiting_key is this execution; it cannot wait for itself")
	}
	if !isSet(b.Result) {
		b.Result = nil
	}
	status, traceID, err := s.engine.UnlockRun(r.Context(), id, lockID, executions.UnlockParams{
		Status: b.Status, Summary: b.ResultSummary, Result: b.Result, Error: b.ErrorMessage, For: b.WaitingFor,
		Key: b.WaitingKey, Timeout: within,
	})
	if err != nil {
		return response{}, err
	}
	return response{body: executionStatus{id, traceID, status}, trace: traceID}, nil
}
