// Package retention deletes old rows according to a policy for each kind.
//
// A policy is a row of the table agent_retention. It sets for how long the database keeps rows of a kind after their
// end. The default of most kinds is forever. Run makes one pass over all kinds; agent serve makes one every hour.
// kinds.go has the statements that find and delete old rows. batch.go runs them, one transaction at a time.
// dependents.go deletes the rows of kinds that have dependent rows. pass.go pauses between batches. partitions.go drops
// whole months of the activity log.
//
// It promises:
//
//   - Under any policy, a pass deletes no unfinished work and no row that such work may need. It keeps unfinished
//     executions, with the executions, activity, checkpoints and requests of their traces, and the events that they may
//     consume. It also keeps threads with a running execution or a queued message, pending approvals and unfinished
//     deliveries. A pass never deletes memory (package memory deletes expired entries and old decided conflicts).
//   - A batch is one short transaction. It examines about 500 rows, skips locked rows, and waits 100 ms for another
//     lock. A pass detaches a partition concurrently, and no query queues behind the detachment.
//   - A kill may end a pass anywhere, and any number of passes may run at once. A batch is atomic. One pass at a time
//     works on a kind, and the next pass continues there.
//
// A row may outlive its policy. It leaves before its own policy only with the row that it belongs to: a prompt with its
// activity, and the event of a completion or a decision with its execution. A pass deletes activity with a policy of 60
// days or longer by whole months. Once a day, a pass examines again the rows that unfinished work needed.
package retention

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Forever is the policy of rows that a pass never deletes.
const Forever = "forever"

// ErrInvalid reports an invalid policy. The message has the reason.
var ErrInvalid = errors.New("not a policy")

// Policy is the retention time of rows of one kind, and the progress of the last pass.
type Policy struct {
	Kind      string     `json:"kind"`
	About     string     `json:"about"`
	Keep      string     `json:"keep"`     // such as "90 days", or Forever
	MinKeep   string     `json:"min_keep"` // the shortest permitted Keep
	ChangedAt time.Time  `json:"changed_at"`
	ChangedBy string     `json:"changed_by"` // empty if nobody has changed the policy
	Removed   int64      `json:"removed"`    // rows deleted by all passes
	EndedAt   *time.Time `json:"ended_at"`   // end of the last full pass; nil while more remains
}

// Show lists the policies by kind.
func Show(ctx context.Context, db postgres.DB) ([]Policy, error) {
	return postgres.Rows[Policy](ctx, db, "read retention", `
		select r.kind, r.about, coalesce(r.keep::text, 'forever') as keep, r.min_keep::text,
		       r.changed_at, r.changed_by, p.removed,
		       case when r.keep is not null then p.ended_at end as ended_at
		  from agent_retention r join agent_retention_passes p on p.kind = r.kind order by r.kind`)
}

// Change is the result of Set. If no policy differed, Changed is false and Set records nothing.
type Change struct {
	Changed    bool   `json:"changed"`
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

// Set changes policies by kind: each an interval in PostgreSQL's syntax (90d, 36 hours) or Forever. It changes all of
// them or, with ErrInvalid, none, and records an activity. reason may be empty.
func Set(ctx context.Context, db postgres.DB, keep map[string]string, by, reason string) (Change, error) {
	policies, err := json.Marshal(keep)
	if err != nil {
		return Change{}, fmt.Errorf("set retention: %w", err)
	}
	var c Change
	b := &pgx.Batch{}
	activity.QueueActor(ctx, b)
	b.Queue(`
		select changed, trace_id, coalesce(activity_id::text, '') from set_agent_retention(@keep::jsonb, @by, @reason)`,
		postgres.Strict{"keep": string(policies), "by": by, "reason": reason}).QueryRow(func(row pgx.Row) error {
		return row.Scan(&c.Changed, &c.TraceID, &c.ActivityID)
	})
	err = db.SendBatch(ctx, b).Close()
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && postgres.IsCode(err, "22023") {
		if pgErr.Hint != "" {
			return Change{}, fmt.Errorf("%w: %s. %s", ErrInvalid, pgErr.Message, strings.TrimSuffix(pgErr.Hint, "."))
		}
		return Change{}, fmt.Errorf("%w: %s", ErrInvalid, pgErr.Message)
	}
	if err != nil {
		return Change{}, fmt.Errorf("set retention: %w", err)
	}
	return c, nil
}
