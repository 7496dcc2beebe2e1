package memory

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

var (
	// ErrConflictNotFound reports an unknown conflict.
	ErrConflictNotFound = errors.New("conflict not found")
	// ErrConflictDecided reports a decided conflict.
	ErrConflictDecided = errors.New("the conflict was decided already")
	// ErrConflictsFull reports that too many conflicts are undecided.
	ErrConflictsFull = errors.New("too many memory conflicts are undecided")
)

// States of a [Conflict].
const (
	ConflictOpen  = "open"
	ConflictKept  = "kept"  // the stored value stayed
	ConflictTaken = "taken" // the late value replaced it
)

// maxConflicts bounds the open conflicts. Concurrent writers may exceed it by one each.
const maxConflicts = 1000

// Conflict is a row of agent_memory_conflicts: a value that was rejected because its key had changed, after the run
// that wrote it had ended. The run can no longer resolve it, so an admin decides.
type Conflict struct {
	ID            string          `json:"id"`
	Owner         Owner           `json:"agent,omitempty"` // owner of the memory
	Category      string          `json:"category"`
	Key           string          `json:"key"`
	Value         json.RawMessage `json:"value"`          // the rejected value
	TTLSeconds    float64         `json:"ttl_seconds"`    // lifetime of the value; 0 for no expiry
	IfRevision    int             `json:"if_revision"`    // the revision that the writer had read; 0 for none
	FoundRevision int             `json:"found_revision"` // the revision at the write; 0 for none
	FoundValue    json.RawMessage `json:"found_value"`
	FoundTraceID  string          `json:"found_trace_id"`
	TraceID       string          `json:"trace_id"` // of the writer
	ExecutionID   *string         `json:"execution_id"`
	Status        string          `json:"status"`
	DecidedBy     string          `json:"decided_by"`
	DecidedReason string          `json:"decided_reason"`
	DecidedAt     *time.Time      `json:"decided_at"`
	CreatedAt     time.Time       `json:"created_at"`
	// The current entry.
	Revision int             `json:"revision"` // 0 for none
	Current  json.RawMessage `json:"current"`
}

const conflictColumns = `
		select c.id, c.owner, c.category, c.key, c.value, c.ttl_seconds, c.if_revision, c.found_revision, c.found_value,
		       c.found_trace_id, c.trace_id, c.execution_id::text, c.status, c.decided_by, c.decided_reason, c.decided_at,
		       c.created_at, coalesce(m.revision, 0) as revision, m.value as current
		  from agent_memory_conflicts c
		  left join agent_memory m on m.owner = c.owner and m.category = c.category and m.key = c.key
		   and (m.expires_at is null or m.expires_at > clock_timestamp())`

// StoreConflict stores a rejected value for an admin's decision, and returns the conflict's id. It reuses an open
// conflict with the same value. For another value it returns [ErrConflictsFull] when 1,000 are undecided. executionID
// may be empty.
func StoreConflict(
	ctx context.Context, db postgres.DB, n Note, c *ConflictError, executionID string,
) (id string, err error) {
	found := Entry{}
	if c.Theirs != nil {
		found = *c.Theirs
	}
	err = db.QueryRow(ctx, `
		with same as (
		  select c.id from agent_memory_conflicts c
		   where c.status = 'open' and c.owner = @owner and c.category = @category and c.key = @key
		     and c.value = @value::jsonb limit 1),
		kept as (
		  insert into agent_memory_conflicts
		         (owner, category, key, value, ttl_seconds, if_revision, found_revision, found_value, found_trace_id,
		          trace_id, execution_id)
		  select @owner, @category, @key, @value, @ttl, @if_revision, @found_revision, @found_value, @found_trace, @trace_id,
		         nullif(@execution, '')::uuid
		   where (select count(*) from (select from agent_memory_conflicts where status = 'open' limit @most) o) < @most
		     and not exists (select from same)
		  returning id)
		select id from same union all select id from kept`,
		postgres.Strict{
			"owner": c.Owner, "category": c.Category, "key": c.Key, "value": c.Yours, "ttl": n.TTL.Seconds(),
			"if_revision":    max(c.Read, 0),
			"found_revision": found.Revision, "found_value": found.Value, "found_trace": found.TraceID, "trace_id": n.TraceID,
			"execution": executionID, "most": maxConflicts,
		}).Scan(&id)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrConflictsFull
	}
	if err != nil {
		return "", fmt.Errorf("store conflict of memory %q: %w", c.Key, err)
	}
	return id, nil
}

// ConflictFilter narrows [Conflicts]; the zero value lists the newest 20 that are open.
type ConflictFilter struct {
	Status        string // ConflictOpen when empty; "all" for all
	Owner         *Owner // owner of the memory; nil for all
	Category, Key string // of one key, when Key is set
	Before        string // an id; returns only older ones
	Limit         int    // 20 when 0, at most 1000
}

// Conflicts lists conflicts, the newest first.
func Conflicts(ctx context.Context, db postgres.DB, f ConflictFilter) ([]Conflict, error) {
	status := cmp.Or(f.Status, ConflictOpen)
	return postgres.Rows[Conflict](ctx, db, "list memory conflicts", conflictColumns+`
		 where (@status = 'all' or c.status = @status) and (@owner::text is null or c.owner = @owner)
		   and (@key = '' or c.key = @key and c.category = @category)
		   and (@before = '' or c.id < nullif(@before, '')::uuid)
		 order by c.id desc limit @limit`,
		postgres.Strict{
			"status": status, "owner": f.Owner, "category": cmp.Or(f.Category, defaultCategory), "key": f.Key,
			"before": f.Before, "limit": postgres.PageSize(f.Limit, defaultLimit, maxLimit),
		})
}

// GetConflict returns one conflict, or [ErrConflictNotFound].
func GetConflict(ctx context.Context, db postgres.DB, id string) (Conflict, error) {
	return postgres.RowOr[Conflict](ctx, db, ErrConflictNotFound, fmt.Sprintf("get memory conflict %.60q", id),
		conflictColumns+` where c.id = lanekeeper.agent_uuid(@id)`, postgres.Strict{"id": id})
}

// Decision decides a conflict.
type Decision struct {
	Take   bool   // the late value replaces the stored one
	By     string // the admin
	Reason string
	// IfRevision is the revision that the admin read; [Absent] for none; 0 for the one at the conflict.
	IfRevision int
	TraceID    string // trace of the write
}

// Decide decides an open conflict in the caller's transaction and returns its row. It returns [ErrConflictDecided]
// after another decision. It writes the late value only at the revision that the admin read. Otherwise it returns a
// [*ConflictError]. After an error the caller must roll back; the conflict then stays open.
func Decide(ctx context.Context, tx pgx.Tx, id string, d Decision) (Conflict, error) {
	if strings.TrimSpace(d.By) == "" {
		return Conflict{}, fmt.Errorf("decide memory conflict: %w: an admin is required", ErrInvalid)
	}
	status := ConflictKept
	if d.Take {
		status = ConflictTaken
	}
	tag, err := tx.Exec(ctx, `
		update agent_memory_conflicts
		   set status = @status, decided_by = @by, decided_reason = left(@reason, 1000), decided_at = clock_timestamp()
		 where id = lanekeeper.agent_uuid(@id) and status = 'open'`,
		postgres.Strict{"id": id, "status": status, "by": d.By, "reason": d.Reason})
	if err != nil {
		return Conflict{}, fmt.Errorf("decide memory conflict: %w", err)
	}
	c, err := GetConflict(ctx, tx, id)
	switch {
	case err != nil:
		return Conflict{}, err
	case tag.RowsAffected() == 0:
		return Conflict{}, fmt.Errorf("decide memory conflict %s, which is %s: %w", id, c.Status, ErrConflictDecided)
	case !d.Take:
		return c, nil
	}
	saved, err := Save(ctx, tx, Note{
		Owner: c.Owner, Category: c.Category, Key: c.Key, Value: c.Value,
		TTL: time.Duration(c.TTLSeconds * float64(time.Second)), TraceID: d.TraceID,
		Revision: cmp.Or(d.IfRevision, c.FoundRevision, Absent),
	})
	if err != nil {
		return Conflict{}, fmt.Errorf("decide memory conflict: %w", err)
	}
	c.Revision, c.Current = saved.Revision, saved.Value
	return c, nil
}
