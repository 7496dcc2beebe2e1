package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/principals"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Flow is the flow of an external call.
const Flow = "mcp.call"

const (
	// answerTTL is how long the caller can collect the answer to an approved call. Later, the same call is a new call.
	answerTTL        = 24 * time.Hour
	callPollInterval = 100 * time.Millisecond
)

// Register registers the flow with the engine, so any process can resume a call after a crash or an approval.
func (s *Server) Register() error {
	s.Engine.Unforkable(Flow, "a call answers one client; call the tool again")
	return s.Engine.Register(Flow, func(ctx context.Context, input json.RawMessage) (executions.Result, error) {
		var in callInput
		if err := json.Unmarshal(input, &in); err != nil {
			return executions.Result{}, fmt.Errorf("read input: %w", err)
		}
		skill, err := executions.Step(ctx, "skill", func(ctx context.Context) (skills.Skill, error) {
			return skills.Get(ctx, s.Pool, in.Skill)
		})
		if err != nil {
			return executions.Result{}, err
		}
		step, call := "skill "+skill.Name, executions.Call{Entry: activity.Entry{Purpose: "called over MCP"}}
		if skill.Trust == skills.TrustApprove {
			id, err := requestApproval(ctx, skill, in.Args)
			if err != nil {
				return executions.Result{}, err
			}
			step, call.OnIntent = approvals.Grant(ctx, id)
		}
		value, err := s.Invoke(ctx, step, skill, in.Args, call)
		if approvals.IsUnusable(err) {
			err = errors.New("the approval has expired, or the skill has changed since it was given")
		}
		if err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: "called " + skill.Name, Value: value}, nil
	})
}

// callInput is the input of the flow.
type callInput struct {
	Skill string          `json:"skill"`
	Args  json.RawMessage `json:"args"`
}

// callTool answers tools/call. The protocol demands a result for a failure of the skill, so the caller's model can read
// it. An error is an internal failure.
func (s *Server) callTool(ctx context.Context, name string, args json.RawMessage) (*sdk.CallToolResult, error) {
	if len(args) == 0 {
		args = json.RawMessage(`{}`)
	}
	skill, err := skills.Get(ctx, s.Pool, name)
	switch {
	case errors.Is(err, skills.ErrNotFound):
		return failureResult("the skill " + name + " no longer exists"), nil
	case err != nil:
		return nil, s.internalError(ctx, err)
	case !skill.Enabled:
		return failureResult("the skill " + skill.OutOfService()), nil
	}
	offered, err := isOffered(ctx, s.Pool, name)
	if err != nil {
		return nil, s.internalError(ctx, err)
	}
	if !offered { // over stdio, the list of tools may be some seconds old
		return failureResult("the skill " + name + " is no longer offered"), nil
	}
	if err := s.Skills.Check(skill, args); err != nil {
		return failureResult(err.Error()), nil
	}
	agentName, err := s.agentName(ctx)
	if err != nil {
		return nil, s.internalError(ctx, err)
	}
	var execution executions.Execution
	spec := executions.Spec{Flow: Flow, Surface: trace.Flow, Agent: agentName, Input: callInput{name, args}}
	if skill.Trust == skills.TrustApprove {
		execution, err = s.callWithApproval(ctx, skill, args, spec)
	} else {
		execution, err = s.run(ctx, spec, skill.Timeout())
	}
	if errors.Is(err, executions.ErrPaused) {
		return failureResult(err.Error()), nil
	}
	if err != nil {
		return nil, s.internalError(ctx, err)
	}
	return toolResult(execution), nil
}

// callWithApproval makes a call of a skill that requires an approval. A client makes such a call twice:
//
//  1. The first try inserts a row of agent_mcp_calls for the skill, the arguments and the caller. It starts an
//     execution, whose dedupe key is the row's id. The execution requests an approval and waits. The client gets the
//     approval's id.
//  2. After the decision, any process resumes the execution, which makes the call once.
//  3. The next try finds the row and the execution, and collects the answer: it sets collected_at. Before the decision,
//     it gets the approval's id again.
//
// A try after that inserts a new row. [Client.Run] deletes rows that nobody collects.
func (s *Server) callWithApproval(
	ctx context.Context, skill skills.Skill, args json.RawMessage, spec executions.Spec,
) (executions.Execution, error) {
	hash, err := approvals.Hash(args)
	if err != nil {
		return executions.Execution{}, err
	}
	if actor := activity.ActorFrom(ctx).Name; actor != activity.Admin && actor != principals.Root {
		hash += " " + actor // another caller must not collect the answer
	}
	for {
		id, err := openCall(ctx, s.Pool, skill, hash)
		if err != nil {
			return executions.Execution{}, err
		}
		spec.DedupeKey = "mcp.call " + id
		execution, err := s.run(ctx, spec, skill.Timeout())
		if err != nil || !execution.Status.Ended() {
			return execution, err
		}
		collected, err := collectAnswer(ctx, s.Pool, id)
		if err != nil {
			return execution, err
		}
		expired := execution.CompletedAt != nil && time.Since(*execution.CompletedAt) > answerTTL
		if collected && !expired && execution.Status != executions.Timeout {
			return execution, nil
		}
		// This is a new call: another try collected the answer, the answer is too old, or nobody decided in time. The
		// last needs a new approval, which a result with an error would not request.
	}
}

// requestApproval requests an approval and waits durably for the decision. The error explains a missing approval.
func requestApproval(ctx context.Context, skill skills.Skill, args json.RawMessage) (id string, err error) {
	approval, err := approvals.Ask(ctx, approvals.Request{
		Skill: skill.Name, SkillID: skill.ID, Revision: skill.Revision, Args: args, Park: true,
	})
	if err != nil {
		return "", err
	}
	decision, err := approvals.Await(ctx, "decision", approval)
	switch {
	case err != nil:
		return "", err
	case decision.TimedOut:
		return "", fmt.Errorf("nobody decided on approval %s in time: %w", approval.ID, executions.ErrTimedOut)
	case decision.Status != "approved":
		return "", fmt.Errorf("the call was not approved (%s): %s", decision.Status, decision.Reason)
	}
	return approval.ID, nil
}

// run starts an execution, or finds the one with the dedupe key, and returns it when it ends or waits. Another process
// may run the execution, for example after this process lost it. run then waits at most a second longer than timeout.
func (s *Server) run(
	ctx context.Context, spec executions.Spec, timeout time.Duration,
) (executions.Execution, error) {
	execution, err := s.Engine.RunSync(ctx, spec)
	if err != nil {
		return execution, err
	}
	deadline := time.Now().Add(timeout + time.Second)
	ticker := time.NewTicker(callPollInterval)
	defer ticker.Stop()
	for !execution.Status.Ended() && execution.Status != executions.Waiting && time.Now().Before(deadline) {
		if execution.ClaimedBy == nil { // it is ready, but no process has claimed it
			if err := s.Engine.ClaimAndRun(ctx, execution.ID); err != nil {
				return execution, err
			}
		}
		if execution, err = executions.Get(ctx, s.Pool, execution.ID); err != nil || execution.Status.Ended() ||
			execution.Status == executions.Waiting {
			return execution, err
		}
		select {
		case <-ctx.Done():
			return execution, context.Cause(ctx)
		case <-ticker.C:
		}
	}
	return execution, nil
}

// openCall returns the id of a call's open row. It inserts a missing row. It renews created_at, so that prune does not
// delete the row before its execution starts.
func openCall(ctx context.Context, db postgres.DB, skill skills.Skill, hash string) (id string, err error) {
	err = db.QueryRow(ctx, `
		insert into agent_mcp_calls as c (skill_name, skill_revision, arguments_hash) values (@skill, @revision, @hash)
		on conflict (skill_name, skill_revision, arguments_hash) where collected_at is null
		do update set created_at = clock_timestamp()
		returning id::text`,
		postgres.Strict{"skill": skill.Name, "revision": skill.Revision, "hash": hash}).Scan(&id)
	if err != nil {
		return "", fmt.Errorf("open call of %s: %w", skill.Name, err)
	}
	return id, nil
}

// collectAnswer marks a call's answer as collected. Only one of several callers gets true.
func collectAnswer(ctx context.Context, db postgres.DB, id string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_mcp_calls set collected_at = clock_timestamp() where id = @id and collected_at is null`,
		postgres.Strict{"id": id})
	return postgres.Changed(tag, err, "collect answer")
}

// internalError logs an internal failure and hides its cause from the caller.
func (s *Server) internalError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.log().ErrorContext(ctx, "MCP call not made", "error", err)
	return errors.New("the call failed inside the server; the server's log has the cause")
}
