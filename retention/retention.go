// Package retention takes away what is over, when it has been over for longer than it is to be kept.
//
// Each kind of rows has a policy, a row of the table agent_retention: how long its rows are kept after they are over,
// or for ever, which is what most begin with. Run makes one pass over all kinds; agent serve makes one every hour. The
// statements that find and delete old rows are in kinds.go; piece.go runs them, one transaction at a time; pass.go
// rests in between; partitions.go drops whole months of the activity log.
//
// It promises:
//
//   - A pass deletes nothing that is unfinished, nor what that may still need, whatever the policy: an execution that
//     has not ended and everything of its trace, with its activity, checkpoints, requests and the events it may take;
//     threads in which somebody works or a message is queued; approvals that are not decided; deliveries that are not
//     settled. A pass never touches memory (package memory drops what has expired, and old decided conflicts).
//   - Nobody waits for a pass. A piece of it is one transaction of a fraction of a second, which skips what others
//     have locked. A partition is detached concurrently: that waits for readers without a lock that others would queue
//     for.
//   - A pass may be killed anywhere, and any number may run at once. A piece has happened or has not. One pass at a
//     time works on a kind, and the next goes on where it stopped.
//
// A row goes no sooner than its policy says. It may go later: activity that is kept for 60 days or longer goes by whole
// months, and a pass comes back once a day to the rows that were needed.
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

// Forever is the policy of what is never taken away.
const Forever = "forever"

// ErrInvalid reports a policy that cannot be. What is wrong with it is in the message.
var ErrInvalid = errors.New("not a policy")

// Policy is how long one kind of rows is kept, and how far the last pass came.
type Policy struct {
	Kind      string     `json:"kind"`
	About     string     `json:"about"`
	Keep      string     `json:"keep"`  // such as "90 days", or Forever
	Least     string     `json:"least"` // the shortest that may be set
	ChangedAt time.Time  `json:"changed_at"`
	ChangedBy string     `json:"changed_by"` // empty: as installed
	Removed   int64      `json:"removed"`    // rows, ever
	EndedAt   *time.Time `json:"ended_at"`   // when all that is old had been looked at; nil while there is more
}

// Show lists the policies by kind.
func Show(ctx context.Context, db postgres.DB) ([]Policy, error) {
	return postgres.Rows[Policy](ctx, db, "read retention", `
		select r.kind, r.about, coalesce(r.keep::text, 'forever') as keep, r.least::text as least,
		       r.changed_at, r.changed_by, p.removed,
		       case when r.keep is not null then p.ended_at end as ended_at
		  from agent_retention r join agent_retention_passes p on p.kind = r.kind order by r.kind`)
}

// Change is what Set did. Changed is false, and nothing recorded, when it was so already.
type Change struct {
	Changed    bool   `json:"changed"`
	TraceID    string `json:"trace_id"`
	ActivityID string `json:"activity_id"`
}

// Set changes policies, by kind: a span of time in PostgreSQL's words (90d, 36 hours) or Forever. All of them or, with
// ErrInvalid, none. It is recorded as an activity. reason may be empty.
func Set(ctx context.Context, db postgres.DB, keep map[string]string, by, reason string) (Change, error) {
	wishes, err := json.Marshal(keep)
	if err != nil {
		return Change{}, fmt.Errorf("set retention: %w", err)
	}
	var c Change
	b := &pgx.Batch{}
	activity.QueueActor(ctx, b)
	b.Queue(`
		select changed, trace_id, coalesce(activity_id::text, '') from set_agent_retention(@keep::jsonb, @by, @reason)`,
		postgres.Strict{"keep": string(wishes), "by": by, "reason": reason}).QueryRow(func(row pgx.Row) error {
		return row.Scan(&c.Changed, &c.TraceID, &c.ActivityID)
	})
	err = db.SendBatch(ctx, b).Close()
	if refused, is := errors.AsType[*pgconn.PgError](err); is && postgres.IsCode(err, "22023") {
		if refused.Hint != "" {
			return Change{}, fmt.Errorf("%w: %s. %s", ErrInvalid, refused.Message, strings.TrimSuffix(refused.Hint, "."))
		}
		return Change{}, fmt.Errorf("%w: %s", ErrInvalid, refused.Message)
	}
	if err != nil {
		return Change{}, fmt.Errorf("set retention: %w", err)
	}
	return c, nil
}
