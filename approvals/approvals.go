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
// Requesters are the principal in the context of every start, fork, retry or manual run, the linked sender of a
// channel's message, the sender of an event that the execution waited for, and the requesters of its parents. In a
// loop, the first 1,000 events count, and the events of the last 16 iterations. A decision closes the list. Without a
// requester only root and the database decide, except for a visitor's chat. Root may decide its own requests, and the
// audit records that.
package approvals

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
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

// codeUsed is the SQLSTATE of an approval that cannot be used.
const codeUsed = "LK003"

// IsUsed reports whether a call failed because its approval is used, rejected or expired.
func IsUsed(err error) bool { return postgres.IsCode(err, codeUsed) }

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
	Agent       string `json:"agent"`
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
	line := fmt.Sprintf("%s in %s (surface %s)", a.Agent, a.Flow, a.Surface)
	switch {
	case a.Participant != "":
		line += fmt.Sprintf(" for %s in thread %s", a.Participant, a.ThreadID)
	case a.Surface == string(trace.Operate):
		line += " for the admin"
	case a.ThreadID != "":
		line += " for the visitor in thread " + a.ThreadID
	}
	if len(a.RequestedBy) > 0 && !slices.Contains(a.RequestedBy, activity.Admin) {
		line += ", requested by " + strings.Join(a.RequestedBy, ", ")
	}
	return line
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

// DecidedError explains an [ErrDecided].
type DecidedError struct{ Approval Approval }

func (e *DecidedError) Unwrap() error { return ErrDecided }

func (e *DecidedError) Error() string {
	a := e.Approval
	at := func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05") + " UTC" }
	switch {
	case a.DecidedAt != nil:
		was := "approved"
		if a.Status == "rejected" {
			was = "rejected"
		}
		message := fmt.Sprintf("the approval was decided already: %s by %s at %s", was, a.Decider(), at(*a.DecidedAt))
		if a.Reason != "" {
			message += ": " + a.Reason
		}
		if a.ConsumedAt != nil {
			message += "; it was used at " + at(*a.ConsumedAt)
		} else if a.Status == "expired" {
			message += "; it has expired since"
		}
		return message
	case a.Reason != "":
		return "the approval is closed: " + a.Reason
	case a.Status == "expired" && a.Parked:
		return "the approval is closed: its execution has ended, or it expired at " + at(a.ExpiresAt)
	case a.Status == "expired":
		return "the approval expired at " + at(a.ExpiresAt)
	}
	return "the approval is for a skill that has changed since"
}

// columns are the columns of an [Approval]. An open one past its time counts as expired.
const columns = `a.id::text, a.trace_id, a.execution_id::text, a.skill_name, a.skill_revision, a.arguments, a.parked,
	case when a.status in ('pending', 'approved') and a.expires_at <= clock_timestamp() then 'expired' else a.status end,
	a.decided_by, a.reason, a.decided_at, a.consumed_at, a.expires_at, a.created_at, a.decided_token_id, a.decided_via,
	a.decided_message, a.four_eyes, a.requested_by,
	coalesce(w.surface, ''), coalesce(w.agent, ''), coalesce(w.flow, ''), coalesce(w.thread_id, ''), coalesce(w.participant, '')`

// asker joins the requesting execution.
const asker = ` left join lateral (
	select x.surface, x.agent, x.flow, x.thread_id, t.participant
	  from agent_executions x left join agent_threads t on t.id = x.thread_id where x.id = a.execution_id) w on true`

// Request is a call that needs an approval.
type Request struct {
	Skill    string
	SkillID  string
	Revision int
	Args     json.RawMessage
	Park     bool // the execution waits for the decision and makes the call
}

// Ask requests an approval as a durable step. Without Park, a second request for the same call returns the open
// approval.
func Ask(ctx context.Context, r Request) (Approval, error) {
	hash, err := Hash(r.Args)
	if err != nil {
		return Approval{}, fmt.Errorf("ask for approval: %w", err)
	}
	return executions.StepTx(ctx, "ask "+r.Skill, func(ctx context.Context, tx pgx.Tx) (Approval, error) {
		if !r.Park {
			if err := closeStale(ctx, tx, r, hash); err != nil {
				return Approval{}, err
			}
		}
		asked, fresh, err := insert(ctx, tx, r, hash)
		if err != nil || !fresh {
			return asked, err
		}
		current, _ := executions.Current(ctx)
		note, err := activity.Note(ctx, tx, activity.Entry{
			Skill: r.Skill, SkillID: r.SkillID, Claim: current.Claim, Kind: activity.KindCall, Input: r.Args,
		}, activity.Outcome{Status: activity.PendingApproval, Output: map[string]string{"approval_id": asked.ID}})
		if err != nil {
			return Approval{}, err
		}
		_, err = tx.Exec(ctx, `
			with noted as (update agent_approvals set activity_id = @note where id = @id returning id)
			select pg_notify('agent_channels', 'approval requested') from noted -- for package channels
			 where exists (select from agent_channels c where c.enabled)`,
			postgres.Strict{"note": note, "id": asked.ID})
		return asked, err
	}, executions.Input(r.Args))
}

// insert adds the row. fresh is false if the same call has an open one; then the requesters are merged.
func insert(ctx context.Context, tx pgx.Tx, r Request, hash string) (_ Approval, fresh bool, err error) {
	current, _ := executions.Current(ctx)
	span, _ := trace.From(ctx)
	var id string
	err = tx.QueryRow(ctx, `
		with recursive line (id, parent_id, run, depth) as (
		  select x.id, coalesce(x.parent_id, x.forked_from), x.input ->> 'run_id', 1
		    from agent_executions x where x.id = @execution_id
		  union all
		  select x.id, coalesce(x.parent_id, x.forked_from), x.input ->> 'run_id', l.depth + 1
		    from line l join agent_executions x on x.id = l.parent_id where l.depth < 50)
		insert into agent_approvals (trace_id, execution_id, step, parked, skill_name, skill_revision, arguments,
		       arguments_hash, expires_at, four_eyes, requested_by)
		select @trace_id, @execution_id, @step, @parked, s.name, s.revision, @arguments, @hash,
		       clock_timestamp() + make_interval(secs => @life), s.four_eyes, array(
		         select substr(k.cause, 11) from line l
		           join agent_links k on k.effect in ('execution ' || l.id, 'run ' || l.run) and k.kind = 'asked'
		         union select substr(k.cause, 11) from line l
		           join agent_checkpoints c on c.execution_id = l.id
		          cross join lateral (
		            select c.output ->> 'event_id' as id where c.waited_for <> ''
		             union all select e #>> '{}' from jsonb_path_query(c.waits, '$[*].event_id') e) v
		           join agent_links k on k.effect = 'event ' || v.id and k.kind = 'asked' order by 1)
		  from agent_skills s where s.name = @skill and s.revision = @revision for share
		on conflict (skill_name, arguments_hash) where status in ('pending', 'approved') and not parked
		do update set requested_by = case when agent_approvals.status = 'pending' then array(
		     select unnest(agent_approvals.requested_by) union select unnest(excluded.requested_by) order by 1)
		   else agent_approvals.requested_by end
		returning id::text, xmax = 0`, postgres.Strict{ // no xmax: the row is new
		"trace_id": string(span.TraceID), "execution_id": current.ID, "step": executions.StepKey(ctx), "parked": r.Park,
		"skill": r.Skill, "revision": r.Revision, "arguments": r.Args, "hash": hash, "life": Lifetime.Seconds(),
	}).Scan(&id, &fresh)
	if errors.Is(err, pgx.ErrNoRows) {
		return Approval{}, false, &executions.StepError{
			Class: "stale_skill", Message: fmt.Sprintf(
				"skill %s was changed or removed since this run read it: no approval was requested", r.Skill),
		}
	}
	if err != nil {
		return Approval{}, false, fmt.Errorf("ask for approval of %s: %w", r.Skill, err)
	}
	asked, err := Get(ctx, tx, id)
	return asked, fresh, err
}

// closeStale closes an open approval of the same call that expired or is for another revision.
func closeStale(ctx context.Context, tx pgx.Tx, r Request, hash string) error {
	_, err := tx.Exec(ctx, `
		update agent_approvals set status = 'expired'
		 where skill_name = @skill and arguments_hash = @hash and status in ('pending', 'approved') and not parked
		   and (expires_at <= clock_timestamp() or skill_revision <> @revision)`,
		postgres.Strict{"skill": r.Skill, "hash": hash, "revision": r.Revision})
	if err != nil {
		return fmt.Errorf("close expired approvals of %s: %w", r.Skill, err)
	}
	return nil
}

// Decide approves or rejects for the principal by, and resumes the waiting execution. It records an activity under the
// trace of ctx, or a new op_ trace. It returns [ErrDecided] if it is too late, [ErrFourEyes] if by requested the call,
// and [ErrNotFound] for an unknown id. The reason is stored as [postgres.Text].
func Decide(ctx context.Context, db postgres.Beginner, id string, approve bool, by, reason string) (Approval, error) {
	reason = postgres.Text(reason)
	if span, ok := trace.From(ctx); !ok || span.TraceID == "" {
		ctx = trace.With(ctx, trace.Span{TraceID: trace.New(trace.Operate), Surface: trace.Operate})
	}
	var decided Approval
	broken := false // a try lost its connection, perhaps after its commit
	decide := func(tx pgx.Tx) error {
		if err := activity.SetActor(ctx, tx); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, `select `+columns+` from decide_agent_approval(@id, @approve, @by, @reason) a`+asker,
			postgres.Strict{"id": id, "approve": approve, "by": by, "reason": reason})
		decided, err = postgres.CollectOne(rows, err, ErrNotFound, "record decision", pgx.RowToStructByPos[Approval])
		if postgres.IsCode(err, codeFourEyes) {
			return ErrFourEyes
		}
		if err != nil {
			return err
		}
		if !approve {
			if err := automations.RecordDenial(ctx, tx, id,
				fmt.Sprintf("rejected by %s: %s (approval %s)", by, reason, id)); err != nil {
				return err
			}
		}
		return recordDecision(ctx, tx, decided, approve)
	}
	err := postgres.RetryOnDisconnect(ctx, func() error {
		err := postgres.InTx(ctx, db, decide)
		if errors.Is(err, ErrNotFound) {
			now, getErr := Get(ctx, db, id)
			switch {
			case postgres.Broken(getErr):
				return getErr
			case errors.Is(getErr, ErrNotFound):
				err = ErrNotFound
			case getErr != nil:
				err = getErr
			case broken && now.DecidedBy == by && now.Reason == reason && approve == (now.Status != "rejected"):
				decided, err = now, nil // by that try
			default:
				err = &DecidedError{now}
			}
		}
		broken = broken || postgres.Broken(err)
		return err
	})
	if err != nil {
		return Approval{}, fmt.Errorf("decide approval %s: %w", id, err)
	}
	return decided, nil
}

// recordDecision writes the row of the activity log.
func recordDecision(ctx context.Context, tx pgx.Tx, a Approval, approve bool) error {
	input := map[string]any{
		"approval_id": a.ID, "skill": a.SkillName,
		"decision": map[bool]string{true: "approve", false: "reject"}[approve], "by": a.DecidedBy, "reason": a.Reason,
	}
	if a.Own(a.DecidedBy) {
		input["four_eyes"] = "the requester decided"
	}
	_, err := activity.Note(ctx, tx, activity.Entry{
		Skill: "decide_approval", Input: activity.Describe(ctx, input),
	}, activity.Outcome{Output: map[string]string{"status": a.Status, "trace_id": a.TraceID}})
	return err
}

// Decision is how an approval was decided.
type Decision struct {
	Status   string // approved, rejected or expired
	Reason   string // the admin's words, or why it expired
	TimedOut bool   `json:"-"` // nobody decided in time
}

// Await waits durably for the decision on an approval. name is that of the wait's step.
func Await(ctx context.Context, name, id string) (d Decision, err error) {
	out, err := executions.Wait(ctx, name, executions.Approval(id, Lifetime))
	switch {
	case err != nil:
		return d, err
	case out.TimedOut:
		d = Decision{Status: "expired", TimedOut: true}
	default:
		if err := json.Unmarshal(out.Data, &d); err != nil {
			return d, fmt.Errorf("read the decision on approval %s: %w", id, err)
		}
	}
	reasons := map[string]string{"expired": "nobody decided in time", "rejected": "an admin rejected it"}
	d.Reason = cmp.Or(d.Reason, reasons[d.Status])
	return d, nil
}

// Grant returns the step of the approved call in the execution of ctx, and its executions.Call.OnIntent.
func Grant(ctx context.Context, id string) (step string, onIntent func(b *pgx.Batch, _ string)) {
	current, _ := executions.Current(ctx)
	step = "approved " + id
	return step, Use(id, current.ID, step)
}

// Use queues the consumption of an approval, as executions.Call.OnIntent. The transaction fails with SQLSTATE LK003 if
// the approval is used, rejected, expired or another execution's.
func Use(id, executionID, step string) func(b *pgx.Batch, _ string) {
	return func(b *pgx.Batch, _ string) {
		b.Queue(`select lanekeeper.use_agent_approval(@id, @execution_id, @step)`,
			postgres.Strict{"id": id, "execution_id": executionID, "step": step})
	}
}

// Hash returns a hash of arguments that ignores the order of keys and writes numbers as jsonb does, so 1e0 is 1.
func Hash(args json.RawMessage) (string, error) {
	v, err := exactjson.Decode(args)
	if err != nil {
		return "", fmt.Errorf("decode arguments: %w", err)
	}
	canonical, err := json.Marshal(exactjson.PlainNumbers(v)) // maps are marshalled with sorted keys
	if err != nil {
		return "", fmt.Errorf("encode arguments: %w", err)
	}
	sum := sha256.Sum256(canonical)
	return hex.EncodeToString(sum[:]), nil
}

// Get returns one approval, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, id string) (Approval, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_approvals a`+asker+` where a.id = @id`,
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
		select `+columns+` from agent_approvals a`+asker+`
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
func Approved(ctx context.Context, db postgres.DB, limit int) ([]Approval, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_approvals a`+asker+`
		 where a.status = 'approved' and not a.parked and a.expires_at > clock_timestamp()
		   and exists (select from agent_skills s
		                where s.name = a.skill_name and s.revision = a.skill_revision and s.enabled)
		 order by a.id limit @limit`, postgres.Strict{"limit": limit})
	return collect(rows, err)
}

// Pending lists undecided approvals, oldest first.
func Pending(ctx context.Context, db postgres.DB, limit int) ([]Approval, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_approvals a`+asker+`
		 where a.status = 'pending' and a.expires_at > clock_timestamp() order by a.id limit @limit`,
		postgres.Strict{"limit": limit})
	return collect(rows, err)
}

func collect(rows pgx.Rows, err error) ([]Approval, error) {
	return postgres.Collect(rows, err, "list approvals", pgx.RowToStructByPos[Approval])
}
