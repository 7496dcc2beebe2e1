package engineroom

import (
	"context"
	_ "embed"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/memory"
)

const (
	maxCategories   = 20
	maxMemories     = 50
	maxEntriesOfKey = 20
	maxGrown        = 5000 // bound of new entries for the growth
	maxMemoryCalls  = 500  // calls of each skill searched for a key's history
)

// memoryUseSQL sums up the memory.
//
//go:embed memory_use.sql
var memoryUseSQL string

// category is a category's totals. Counts stop at countLimit.
type category struct {
	Category  string
	Entries   int64
	Bytes     int64 // of keys and values, as stored
	UpdatedAt time.Time
	Day       int64 // entries created in the last day
	DayBytes  int64
	Week      int64
	WeekBytes int64
}

// Over reports a count at its bound.
func (c category) Over() bool { return c.Entries >= countLimit }

// memoryUse sums up the memory by category.
func (room *Room) memoryUse(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := postgres.Rows[category](ctx, room.Read, "sum up memory", memoryUseSQL, postgres.Strict{
		"categories": maxCategories + 1, "count_limit": countLimit, "window": maxGrown,
	})
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, maxCategories)
	var grown int64
	for _, c := range list {
		grown += c.Week
	}
	return map[string]any{
		"Categories": list, "More": more, "GrownOver": grown >= maxGrown,
	}, nil
}

// memoryRow is an entry as shown.
type memoryRow struct {
	ID, Agent, Category, Key string
	Value                    string // JSON, cut
	Bytes                    int64  // of the whole value
	Revision                 int
	TraceID                  string
	ExpiresAt                *time.Time
	CreatedAt                time.Time
	UpdatedAt                time.Time
}

// Shown formats the value.
func (r memoryRow) Shown() shownValue { return shownJSON(r.Value, r.Bytes) }

// memoryFilter holds the filters.
type memoryFilter struct {
	Agent, Words, Category, Prefix, Before string
	categories                             []string // categories that Category stands for; nil without it
}

// Narrowed reports whether any filter is set.
func (f memoryFilter) Narrowed() bool {
	return f.Agent != "" || f.Words != "" || f.Category != "" || f.Prefix != ""
}

// memoryPage shows the memory.
func (room *Room) memoryPage() page {
	return page{
		path: "/memory", name: "memory", navLabel: "Memory", title: "Memory", open: room.openMemoryList,
		parts: []part{
			room.filtersPart("/memory", "category", "agent"),
			{name: "conflicts", interval: 3 * time.Second, load: room.memoryConflicts},
			{name: "use", interval: 30 * time.Second, refreshOnActivity: true, load: room.memoryUse},
			{name: "entries", interval: 3 * time.Second, load: room.memories},
		},
	}
}

// openMemoryList reads the filters from the URL.
func (room *Room) openMemoryList(ctx context.Context, req *pageRequest) (string, error) {
	var filter memoryFilter
	var err error
	for name, target := range map[string]*string{
		"agent": &filter.Agent, "q": &filter.Words, "category": &filter.Category,
		"prefix": &filter.Prefix,
	} {
		if *target, err = req.textFilter(name); err != nil {
			return "", err
		}
	}
	if filter.Before, err = req.uuidFilter("before"); err != nil {
		return "", err
	}
	if filter.categories, err = room.namesLike(ctx, req, "category", filter.Category); err != nil {
		return "", err
	}
	req.Subject = filter
	return "", nil
}

// memories reads a page of entries, the newest key first. All filters combine.
func (room *Room) memories(ctx context.Context, req *pageRequest) (any, error) {
	filter := req.Subject.(memoryFilter)
	list, err := postgres.Rows[memoryRow](ctx, room.Read, "list memory", `
		select m.id::text, left(m.owner, 100) as agent, m.category, m.key, left(m.value::text, 8192) as value,
		       octet_length(m.value::text) as bytes, m.revision, left(m.trace_id, 300) as trace_id, m.expires_at,
		       m.created_at, m.updated_at
		  from (select m.* from agent_memory m
		         where (@categories::text[] is null or m.category = any (@categories))
		           and (@prefix::text = '' or m.id = any (array(
		                (select k.id from agent_memory k where k.key like @prefix limit @window)
		                union
		                (select n.id from (select b.id, b.key from agent_memory b order by b.id desc limit @window) n
		                  where n.key ilike @part))))
		           and (@words::text = '' or m.search @@ websearch_to_tsquery('simple', @words))
		           and (@before::text = '' or m.id < nullif(@before, '')::uuid)
		           and (m.expires_at is null or m.expires_at > clock_timestamp())
		         order by m.id desc limit case when @agent::text = '' then @limit::int + 1 else @window end) m
		 where @agent::text = '' or m.owner ilike @agent
		 order by m.id desc limit @limit::int + 1`,
		customPlan, postgres.Strict{
			"agent": containsPattern(filter.Agent), "categories": filter.categories, "prefix": prefixPattern(filter.Prefix),
			"part": containsPattern(filter.Prefix), "window": maxSearched, "words": filter.Words,
			"before": filter.Before, "limit": maxMemories,
		})
	if err != nil {
		return nil, err
	}
	for i := range list {
		list[i].Value = redact.Text(list[i].Value, maxValue)
	}
	list, links := paginate(req, list, maxMemories, func(m memoryRow) string { return m.ID })
	return map[string]any{"Asked": filter, "Entries": list, "Links": links}, nil
}

// prefixPattern returns the pattern of a prefix; empty for none.
func prefixPattern(text string) string {
	if text == "" {
		return ""
	}
	return strings.NewReplacer(`\`, `\\`, `%`, `\%`, `_`, `\_`).Replace(text) + "%"
}

// memoryEntryPage shows the entries of a key.
func (room *Room) memoryEntryPage() page {
	return page{
		path: "/memory/{key...}", name: "memory-entry", title: "Memory", open: room.openMemory,
		parts: []part{
			{name: "entry", interval: 3 * time.Second, load: room.sameKey},
			{name: "history", interval: 30 * time.Second, refreshOnActivity: true, load: room.keyHistory},
		},
	}
}

// memoryKey is the key of a page.
type memoryKey struct{ Key, Category string }

func (room *Room) openMemory(ctx context.Context, req *pageRequest) (string, error) {
	subject := memoryKey{Key: req.path("key")}
	var err error
	if subject.Category, err = req.textFilter("category"); err != nil {
		return "", err
	}
	req.Subject = subject
	list, err := room.entriesOf(ctx, subject)
	if err != nil {
		return "", err
	}
	if len(list) == 0 {
		return "", notFound("no memory has the key %.60q; it may have been forgotten, or have expired", subject.Key)
	}
	return cut(80, subject.Key), nil
}

// sameKey reads the key's entry in each category.
func (room *Room) sameKey(ctx context.Context, req *pageRequest) (any, error) {
	list, err := room.entriesOf(ctx, req.Subject.(memoryKey))
	return map[string]any{"Entries": list}, err
}

func (room *Room) entriesOf(ctx context.Context, subject memoryKey) ([]memoryRow, error) {
	if strings.ContainsRune(subject.Key, 0) || len(subject.Key) > maxFilterBytes {
		return nil, memory.ErrNotFound
	}
	return postgres.Rows[memoryRow](ctx, room.Read, "read memory", `
		select m.id::text, left(m.owner, 100) as agent, m.category, m.key, left(m.value::text, 8192) as value,
		       octet_length(m.value::text) as bytes, m.revision, left(m.trace_id, 300) as trace_id, m.expires_at,
		       m.created_at, m.updated_at
		  from agent_memory m
		 where m.key = @key and (@category::text = '' or m.category = @category)
		   and (m.expires_at is null or m.expires_at > clock_timestamp())
		 order by m.owner, m.category limit @limit`,
		customPlan, postgres.Strict{"key": subject.Key, "category": subject.Category, "limit": maxEntriesOfKey})
}

// keyChange is an action that wrote or deleted an entry of a key.
type keyChange struct {
	ID, TraceID, SkillName, Status, Category, Agent string
	At                                              time.Time
}

// keyHistory finds the writers of a key among the latest calls of the memory skills.
func (room *Room) keyHistory(ctx context.Context, req *pageRequest) (any, error) {
	list, err := postgres.Rows[keyChange](ctx, room.Read, "find who wrote memory", `
		select a.id::text, a.trace_id, a.skill_name, a.status, coalesce(left(a.input ->> 'category', 255), '') as category,
		       left(a.agent, 100) as agent, a.created_at as at
		  from unnest(array['memory_write', 'memory_forget', 'save_memory', 'set_memory', 'forget_memory',
		              'decide_memory_conflict']) s (name)
		  cross join lateral (select * from agent_activity x where x.skill_name = s.name order by x.id desc limit @window) a
		 where a.input ->> 'key' = @key
		 order by a.id desc limit @limit`,
		postgres.Strict{"key": req.Subject.(memoryKey).Key, "window": maxMemoryCalls, "limit": maxEntriesOfKey})
	if err != nil {
		return nil, err
	}
	return map[string]any{"Touches": list, "Window": maxMemoryCalls}, nil
}

const maxMemoryConflicts = 20

// memoryConflict is a rejected value with the current one.
type memoryConflict struct {
	ID, Agent, Category, Key, TraceID string
	Value, Current                    string // JSON, cut
	Bytes, CurrentBytes               int64
	IfRevision, FoundRevision         int
	Revision                          int // current revision; 0 for none
	CurrentTrace                      string
	CreatedAt                         time.Time
}

// RejectedValue is the rejected value.
func (c memoryConflict) RejectedValue() shownValue { return shownJSON(c.Value, c.Bytes) }

// CurrentValue is the current value.
func (c memoryConflict) CurrentValue() shownValue { return shownJSON(c.Current, c.CurrentBytes) }

// memoryConflicts reads the open conflicts, newest first.
func (room *Room) memoryConflicts(ctx context.Context, _ *pageRequest) (any, error) {
	list, err := postgres.Rows[memoryConflict](ctx, room.Read, "list memory conflicts", `
		select c.id::text, left(c.owner, 100) as agent, c.category, c.key, left(c.trace_id, 300) as trace_id,
		       left(c.value::text, 8192) as value, octet_length(c.value::text) as bytes,
		       coalesce(left(m.value::text, 8192), '') as current, coalesce(octet_length(m.value::text), 0) as current_bytes,
		       c.if_revision, c.found_revision, coalesce(m.revision, 0) as revision,
		       coalesce(left(m.trace_id, 300), '') as current_trace, c.created_at
		  from (select * from agent_memory_conflicts x where x.status = 'open' order by x.id desc limit @limit::int + 1) c
		  left join agent_memory m on m.owner = c.owner and m.category = c.category and m.key = c.key
		   and (m.expires_at is null or m.expires_at > clock_timestamp())
		 order by c.id desc`, postgres.Strict{"limit": maxMemoryConflicts})
	if err != nil {
		return nil, err
	}
	list, more := firstN(list, maxMemoryConflicts)
	return map[string]any{"Conflicts": list, "More": more}, nil
}
