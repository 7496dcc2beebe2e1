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
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Flow is the flow of a call from outside.
const Flow = "mcp.call"

const (
	// answerLife is how long the answer to an approved call is kept for the caller; later the same call is a new one.
	answerLife = 24 * time.Hour
	pollCall   = 100 * time.Millisecond
)

// callInput is the input of the flow.
type callInput struct {
	Skill string          `json:"skill"`
	Args  json.RawMessage `json:"args"`
}

// Register makes the flow known to the engine, so that every process can go on with a call whose process died or
// whose approval came.
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
			id, err := leave(ctx, skill, in.Args)
			if err != nil {
				return executions.Result{}, err
			}
			current, _ := executions.Current(ctx)
			step = "approved " + id
			call.Also = approvals.Use(id, current.ID, step)
		}
		value, err := s.Invoke(ctx, step, skill, in.Args, call)
		if approvals.IsUsed(err) {
			err = errors.New("the approval has expired, or the skill has changed since it was given")
		}
		if err != nil {
			return executions.Result{}, err
		}
		return executions.Result{Summary: "called " + skill.Name, Value: value}, nil
	})
}

// leave asks for an approval and waits, durably, until it is given. The error says why it was not.
func leave(ctx context.Context, skill skills.Skill, args json.RawMessage) (id string, err error) {
	asked, err := approvals.Ask(ctx, approvals.Request{
		Skill: skill.Name, SkillID: skill.ID, Revision: skill.Revision, Args: args, Park: true,
	})
	if err != nil {
		return "", err
	}
	out, err := executions.Wait(ctx, "decision", executions.Approval(asked.ID, approvals.Lifetime))
	switch {
	case err != nil:
		return "", err
	case out.TimedOut:
		return "", fmt.Errorf("nobody decided on approval %s in time: %w", asked.ID, executions.ErrTimedOut)
	}
	var decision struct{ Status, Reason string }
	if err := json.Unmarshal(out.Data, &decision); err != nil {
		return "", fmt.Errorf("read the decision on approval %s: %w", asked.ID, err)
	}
	if decision.Status != "approved" {
		return "", fmt.Errorf("the call was not approved (%s): %s", decision.Status, decision.Reason)
	}
	return asked.ID, nil
}

// call answers tools/call. What goes wrong with the skill is a result that says so, as the protocol wants it, so that the
// caller's model can read it; an error is a fault of ours.
func (s *Server) call(ctx context.Context, name string, args json.RawMessage) (*sdk.CallToolResult, error) {
	if len(args) == 0 {
		args = json.RawMessage(`{}`)
	}
	skill, err := skills.Get(ctx, s.Pool, name)
	switch {
	case errors.Is(err, skills.ErrNotFound):
		return failure("there is no skill " + name + " any more"), nil
	case err != nil:
		return nil, s.fault(ctx, err)
	case !skill.Enabled:
		return failure("the skill " + skill.OutOfService()), nil
	}
	if err := s.Skills.Check(skill, args); err != nil {
		return failure(err.Error()), nil
	}
	var ended executions.Execution
	spec := executions.Spec{Flow: Flow, Surface: trace.Flow, Agent: s.Agent, Input: callInput{name, args}}
	if skill.Trust == skills.TrustApprove {
		ended, err = s.withLeave(ctx, skill, args, spec)
	} else {
		ended, err = s.Engine.RunNow(ctx, spec)
	}
	if errors.Is(err, executions.ErrPaused) {
		return failure(err.Error()), nil
	}
	if err != nil {
		return nil, s.fault(ctx, err)
	}
	return answer(ended), nil
}

// fault hides the cause of a fault from the caller and logs it.
func (s *Server) fault(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	s.log().ErrorContext(ctx, "MCP call not made", "error", err)
	return errors.New("the call could not be made; the server's log says why")
}

// withLeave leads a call that needs an approval to the execution that its first try began, and begins one where there is
// none whose answer is due. It returns an execution that has ended, whose answer is then this caller's alone, or one
// that has not.
func (s *Server) withLeave(ctx context.Context, skill skills.Skill, args json.RawMessage, spec executions.Spec) (executions.Execution, error) {
	hash, err := approvals.Hash(args)
	if err != nil {
		return executions.Execution{}, err
	}
	for {
		id, err := openCall(ctx, s.Pool, skill, hash)
		if err != nil {
			return executions.Execution{}, err
		}
		spec.DedupeKey = "mcp.call " + id
		x, err := s.Engine.RunNow(ctx, spec)
		if err != nil {
			return x, err
		}
		if x, err = s.settled(ctx, x, skill.Timeout()); err != nil || !x.Status.Ended() {
			return x, err
		}
		mine, err := collect(ctx, s.Pool, id)
		if err != nil {
			return x, err
		}
		old := x.CompletedAt != nil && time.Since(*x.CompletedAt) > answerLife
		if mine && !old && x.Status != executions.Timeout {
			return x, nil
		}
		// Somebody else has the answer, or it is of no use any more: this is a new call.
	}
}

// settled waits for an execution that runs, here or elsewhere, to end or to wait, within patience.
func (s *Server) settled(ctx context.Context, x executions.Execution, patience time.Duration) (executions.Execution, error) {
	deadline := time.Now().Add(patience + time.Second)
	ticker := time.NewTicker(pollCall)
	defer ticker.Stop()
	for !x.Status.Ended() && x.Status != executions.Waiting && time.Now().Before(deadline) {
		if x.ClaimedBy == nil { // it is ready: nobody runs it yet
			if err := s.Engine.Attend(ctx, x.ID); err != nil {
				return x, err
			}
		}
		var err error
		if x, err = executions.Get(ctx, s.Pool, x.ID); err != nil || x.Status.Ended() || x.Status == executions.Waiting {
			return x, err
		}
		select {
		case <-ctx.Done():
			return x, context.Cause(ctx)
		case <-ticker.C:
		}
	}
	return x, nil
}

// openCall returns the id of the open row of a call, made where there is none.
func openCall(ctx context.Context, db postgres.DB, skill skills.Skill, hash string) (id string, err error) {
	err = db.QueryRow(ctx, `
		insert into agent_mcp_calls as c (skill_name, skill_revision, arguments_hash) values (@skill, @revision, @hash)
		on conflict (skill_name, skill_revision, arguments_hash) where collected_at is null
		do update set skill_name = c.skill_name
		returning id::text`,
		postgres.Strict{"skill": skill.Name, "revision": skill.Revision, "hash": hash}).Scan(&id)
	if err != nil {
		return "", fmt.Errorf("open call of %s: %w", skill.Name, err)
	}
	return id, nil
}

// collect takes the answer of a call; one of many who try gets true.
func collect(ctx context.Context, db postgres.DB, id string) (bool, error) {
	tag, err := db.Exec(ctx, `
		update agent_mcp_calls set collected_at = clock_timestamp() where id = @id and collected_at is null`,
		postgres.Strict{"id": id})
	if err != nil {
		return false, fmt.Errorf("collect answer: %w", err)
	}
	return tag.RowsAffected() > 0, nil
}

// answer shows an execution as the result of a tool.
func answer(x executions.Execution) *sdk.CallToolResult {
	var r *sdk.CallToolResult
	switch {
	case x.Status == executions.Completed:
		r = success(x.Result)
	case x.Status == executions.Waiting && x.WaitingFor != nil && *x.WaitingFor == "approval":
		r = pending(*x.WaitingKey)
	case !x.Status.Ended():
		r = failure("the call is still under way; call again with the same arguments")
	case x.ErrorMessage != nil:
		r = failure(*x.ErrorMessage)
	default:
		r = failure("the call was " + string(x.Status))
	}
	r.Meta = sdk.Meta{"lanekeeper/trace-id": x.TraceID, "lanekeeper/execution-id": x.ID}
	return r
}

// success is the value as text and, where it is an object, as structured content.
func success(value json.RawMessage) *sdk.CallToolResult {
	var text string
	var fields map[string]json.RawMessage
	r := &sdk.CallToolResult{}
	switch {
	case json.Unmarshal(value, &text) == nil:
	case json.Unmarshal(value, &fields) == nil && fields != nil:
		text, r.StructuredContent = string(value), value
	default:
		text = string(value)
	}
	r.Content = []sdk.Content{&sdk.TextContent{Text: text}}
	return r
}

// pending says that an admin is asked. It is marked as an error, because nothing was done: a caller that looks at the
// flag alone must not take the call for made.
func pending(approval string) *sdk.CallToolResult {
	r := failure(fmt.Sprintf("Nothing was done yet: the call awaits approval %s. Once an admin has approved it, call again with the same arguments.", approval))
	r.StructuredContent = map[string]string{"status": "pending_approval", "approval_id": approval}
	return r
}

// failure is a result that says what went wrong.
func failure(text string) *sdk.CallToolResult {
	return &sdk.CallToolResult{IsError: true, Content: []sdk.Content{&sdk.TextContent{Text: text}}}
}
