package engineroom

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const mostMemoryConflicts = 20

// memoryConflict is a value that was not written, and what is there.
type memoryConflict struct {
	ID, Agent, Category, Key, TraceID string
	Value, Current                    string // JSON, cut
	Bytes, CurrentBytes               int64
	IfRevision, FoundRevision         int
	Revision                          int // what is there now; 0: nothing
	CurrentTrace                      string
	CreatedAt                         time.Time
}

// Late is the value that was not written.
func (c memoryConflict) Late() shownValue { return shownJSON(c.Value, c.Bytes) }

// There is what the key holds.
func (c memoryConflict) There() shownValue { return shownJSON(c.Current, c.CurrentBytes) }

// memoryConflicts reads the conflicts that await a decision, the newest first.
func (room *Room) memoryConflicts(ctx context.Context, _ *visit) (any, error) {
	rows, err := room.Read.Query(ctx, `
		select c.id::text, left(c.owner, 100) as agent, c.category, c.key, left(c.trace_id, 300) as trace_id, left(c.value::text, 4000) as value,
		       octet_length(c.value::text) as bytes, coalesce(left(m.value::text, 4000), '') as current,
		       coalesce(octet_length(m.value::text), 0) as current_bytes, c.if_revision, c.found_revision,
		       coalesce(m.revision, 0) as revision, coalesce(left(m.trace_id, 300), '') as current_trace, c.created_at
		  from (select * from agent_memory_conflicts x where x.status = 'open' order by x.id desc limit @most::int + 1) c
		  left join agent_memory m on m.owner = c.owner and m.category = c.category and m.key = c.key
		   and (m.expires_at is null or m.expires_at > clock_timestamp())
		 order by c.id desc`, postgres.Strict{"most": mostMemoryConflicts})
	if err != nil {
		return nil, fmt.Errorf("list memory conflicts: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[memoryConflict])
	if err != nil {
		return nil, fmt.Errorf("list memory conflicts: %w", err)
	}
	list, more := onPage(list, mostMemoryConflicts)
	return map[string]any{"Conflicts": list, "More": more}, nil
}
