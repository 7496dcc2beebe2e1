// Package approvals stores an admin's decisions about calls. An approval permits one call.
//
// A call of a skill with trust "approve" needs an approval. [Ask] inserts a pending approval with the exact arguments,
// and a pending_approval activity, in the transaction of the step's checkpoint. An admin decides by compare-and-set:
// one of several concurrent decisions takes effect. The call is then made in one of two ways:
//
//   - Parked (Request.Park): the execution waits for the decision ([Await]) and makes the call. The approval belongs to
//     this execution and is void at its end.
//   - Recorded: the run continues without the call, as a heartbeat does. A later run makes the call. A second request
//     for the same call returns the open approval.
//
// An approval is bound to the skill's revision and the hash of the arguments. When the skill changes or is removed, the
// database closes its open approvals with an activity (close_approval), and resumes the waiting executions. [Use]
// consumes an approval in the transaction of the call's intent, for one step of one execution, so neither a crash nor
// another run uses it twice. No output of a model reaches [Decide].
//
// A skill may require four eyes: then the database refuses the decision of a principal that requested the execution.
// Requesters are the principals of each start, fork, retry and manual run, and the linked sender of a channel's
// message. The senders of awaited events and the requesters of parents are requesters too. In a loop, the first 1,000
// events count, and the events of the last 16 iterations. A decision closes the list. Without a requester only root and
// the database decide, except for a visitor's chat. Root may decide its own requests, and the audit records that.
package approvals

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Lifetime bounds the time to the decision, and from there to the use.
const Lifetime = 7 * 24 * time.Hour

// Errors that callers distinguish.
var (
	// ErrDecided reports an approval that is decided, expired or void.
	ErrDecided = errors.New("the approval was decided already, has expired, its execution has ended, or its skill has " +
		"changed since")
	// ErrFourEyes reports a decision by a requester, or by another principal than root if no requester is known.
	ErrFourEyes = errors.New("four eyes: a requester cannot decide its call, and only root decides if none is known")
	// ErrNotFound reports an unknown approval.
	ErrNotFound = errors.New("no such approval")
)

// codeFourEyes is the SQLSTATE of ErrFourEyes.
const codeFourEyes = "LK011"

// Approval is a requested call, with its decision.
type Approval struct {
	ID            string          `json:"id"`
	TraceID       string          `json:"trace_id"`
	ExecutionID   *string         `json:"execution_id"`
	SkillName     string          `json:"skill_name"`
	SkillRevision int             `json:"skill_revision"`
	Arguments     json.RawMessage `json:"arguments"`
	Parked        bool            `json:"parked"` // its execution waits for the decision
	Status        string          `json:"status"` // pending, approved, rejected, expired or consumed
	DecidedBy     string          `json:"decided_by"`
	Reason        string          `json:"reason"`
	DecidedAt     *time.Time      `json:"decided_at"`
	ConsumedAt    *time.Time      `json:"consumed_at"`
	ExpiresAt     time.Time       `json:"expires_at"`
	CreatedAt     time.Time       `json:"created_at"`
	TokenID       string          `json:"decided_token_id"` // the API token of the decision, if any
	Via           string          `json:"decided_via"`      // page, http, cli, slack, telegram or sql
	Message       string          `json:"decided_message"`  // the channel's message with the decision, if any
	FourEyes      bool            `json:"four_eyes"`        // no principal of RequestedBy decides, except root
	RequestedBy   []string        `json:"requested_by"`     // the known principals
	// The requesting execution; empty after its deletion.
	Surface     string `json:"surface"`
	Agent       string `json:"agent"` // that requested the call
	Flow        string `json:"flow"`
	ThreadID    string `json:"thread_id"`
	Participant string `json:"participant"` // the thread's visitor
}

// Waits reports whether an execution waits for the decision or is about to make the call.
func (a Approval) Waits() bool { return a.Parked && (a.Status == "pending" || a.Status == "approved") }

// AskedBy describes the requester for people; empty if unknown.
func (a Approval) AskedBy() string {
	if a.Agent == "" {
		return ""
	}
	text := fmt.Sprintf("%s in %s (surface %s)", a.Agent, a.Flow, a.Surface)
	switch {
	case a.Participant != "":
		text += fmt.Sprintf(" for %s in thread %s", a.Participant, a.ThreadID)
	case a.Surface == string(trace.Operate):
		text += " for the admin"
	case a.ThreadID != "":
		text += " for the visitor in thread " + a.ThreadID
	}
	if len(a.RequestedBy) > 0 && !slices.Contains(a.RequestedBy, activity.Admin) {
		text += ", requested by " + strings.Join(a.RequestedBy, ", ")
	}
	return text
}

// Decider names the principal that decided, and the way, for people.
func (a Approval) Decider() string {
	decider := a.DecidedBy
	if a.Via != "" {
		decider += " via " + a.Via
	}
	if a.TokenID != "" {
		decider += " with token " + a.TokenID
	}
	if a.Message != "" {
		decider += ", message " + a.Message
	}
	return decider
}

// Own reports whether four eyes are required and the principal requested the call. Then it decides only if it is root.
func (a Approval) Own(principal string) bool {
	return a.FourEyes && slices.Contains(a.RequestedBy, principal)
}

// RootOnly reports whether four eyes are required and no requester is known. A visitor of a chat counts as known.
func (a Approval) RootOnly() bool {
	return a.FourEyes && len(a.RequestedBy) == 0 && a.Surface != string(trace.Chat)
}

// columns are the columns of an [Approval]. An open one past its time counts as expired.
const columns = `a.id::text, a.trace_id, a.execution_id::text, a.skill_name, a.skill_revision, a.arguments, a.parked,
	case when a.status in ('pending', 'approved') and a.expires_at <= clock_timestamp() then 'expired' else a.status end,
	a.decided_by, a.reason, a.decided_at, a.consumed_at, a.expires_at, a.created_at, a.decided_token_id, a.decided_via,
	a.decided_message, a.four_eyes, a.requested_by,
	coalesce(w.surface, ''), coalesce(w.agent, ''), coalesce(w.flow, ''), coalesce(w.thread_id, ''),
	coalesce(w.participant, '')`

// joinRequester joins the requesting execution. Within it, an automation or an objective may have another agent.
const joinRequester = ` left join lateral (
	select x.surface, x.flow, x.thread_id, t.participant,
	       coalesce((select n.agent from agent_activity n where n.id = a.activity_id), x.agent) as agent
	  from agent_executions x left join agent_threads t on t.id = x.thread_id where x.id = a.execution_id) w on true`

// Get returns one approval, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, id string) (Approval, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_approvals a`+joinRequester+` where a.id = @id`,
		postgres.Strict{"id": id})
	return postgres.CollectOne(rows, err, ErrNotFound, "read approval "+id, pgx.RowToStructByPos[Approval])
}

// Filter narrows [List]; the zero value lists the newest 50. Before, an id, selects older approvals. Limit is at most
// 500.
type Filter struct {
	Status, Skill, Before string
	TraceIDs              []trace.ID // what [trace.ParseAny] makes of one id
	Limit                 int
}

// List returns approvals, newest first. One past its time is expired.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Approval, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_approvals a`+joinRequester+`
		 where (@status = ''
		        or (@status not in ('pending', 'approved', 'expired') and a.status = @status)
		        or (@status in ('pending', 'approved') and a.status = @status and a.expires_at > clock_timestamp())
		        or (@status = 'expired' and (a.status = 'expired'
		            or (a.status in ('pending', 'approved') and a.expires_at <= clock_timestamp()))))
		   and (@skill = '' or a.skill_name = @skill) and (@trace_ids::text[] is null or a.trace_id = any (@trace_ids))
		   and (@before = '' or a.id < nullif(@before, '')::uuid)
		 order by a.id desc limit @limit`,
		postgres.Strict{
			"status": f.Status, "skill": f.Skill, "trace_ids": f.TraceIDs, "before": f.Before,
			"limit": postgres.PageSize(f.Limit, 50, 500),
		})
	return collect(rows, err)
}

// Approved lists unused approvals that no execution waits for, and whose skill is enabled and unchanged, oldest first.
// An agent selects those that it requested; "" selects all.
func Approved(ctx context.Context, db postgres.DB, agent string, limit int) ([]Approval, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_approvals a`+joinRequester+`
		 where a.status = 'approved' and not a.parked and a.expires_at > clock_timestamp()
		   and exists (select from agent_skills s
		                where s.name = a.skill_name and s.revision = a.skill_revision and s.enabled)
		   and (@agent = '' or w.agent = @agent)
		 order by a.id limit @limit`, postgres.Strict{"agent": agent, "limit": limit})
	return collect(rows, err)
}

// Pending lists undecided approvals, oldest first.
func Pending(ctx context.Context, db postgres.DB, limit int) ([]Approval, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_approvals a`+joinRequester+`
		 where a.status = 'pending' and a.expires_at > clock_timestamp() order by a.id limit @limit`,
		postgres.Strict{"limit": limit})
	return collect(rows, err)
}

func collect(rows pgx.Rows, err error) ([]Approval, error) {
	return postgres.Collect(rows, err, "list approvals", pgx.RowToStructByPos[Approval])
}
