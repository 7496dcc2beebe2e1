// Package memory stores what the agent keeps between runs: the table agent_memory.
//
// An entry is a JSON value under a category and a key. Each write increments the key's revision. A deleted key
// continues its revisions for 90 days; [Expire] then forgets them. A writer names the revision that it has read, or
// [Absent]. If the key is at another revision, nothing is written, and the [ConflictError] has both values. [Seen] is
// what a run has read. A rejected value whose writer has ended becomes a [Conflict], which an admin decides. An entry
// has the trace of its last write, if the writer had one.
//
// An entry belongs to an [Owner]: the shared memory, or one agent's. The owner is a part of the key, so the methods of
// one Owner neither read nor change the entries of another.
//
// A value that looks like a secret (package redact) is rejected, because models and people read the memory. A
// category holds at most 5,000 entries. Concurrent writers may exceed that bound by one entry each.
//
// Reads ignore expired entries, by the database's clock; [Expire] deletes them. [Owner.Search] is PostgreSQL's
// full-text search without a language, because keys and values often hold names. It needs no extension.
//
// An [Index] adds semantic search, if an embedding model is configured and the extension vector is installed. Writers
// do not wait for the embedding server: [Index.Run] embeds entries later. A vector belongs to one revision of an
// entry and is deleted with it.
package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

var (
	// ErrNotFound reports an unknown or expired entry.
	ErrNotFound = errors.New("memory not found")
	// ErrConflict reports an entry at another revision than the caller read. The error is a [*ConflictError].
	ErrConflict = errors.New("memory was changed by somebody else; read it again")
	// ErrSecret reports a value or key that looks like a secret.
	ErrSecret = errors.New("this looks like a secret, and secrets are not remembered; keep where to find it instead")
	// ErrFull reports a full category.
	ErrFull = errors.New("the category is full; forget something, or let entries expire")
	// ErrInvalid reports an invalid note; the error says why.
	ErrInvalid = errors.New("invalid")
)

const (
	defaultCategory = "general"
)

// Owner is the owner of a memory: an agent's name, or [Shared].
type Owner string

// Shared is the memory of all agents without their own.
const Shared Owner = ""

// Entry is a row of agent_memory.
type Entry struct {
	ID        string          `json:"id"`
	Owner     Owner           `json:"agent,omitempty"` // owner of the memory
	Category  string          `json:"category"`
	Key       string          `json:"key"`
	Value     json.RawMessage `json:"value"`
	Revision  int             `json:"revision"`
	TraceID   string          `json:"trace_id"`
	ExpiresAt *time.Time      `json:"expires_at"` // nil for no expiry
	CreatedAt time.Time       `json:"created_at"`
	UpdatedAt time.Time       `json:"updated_at"`
}

// entryColumns are the columns of an Entry; m is agent_memory.
const entryColumns = `m.id, m.owner, m.category, m.key, m.value, m.revision, m.trace_id, m.expires_at, m.created_at,
	m.updated_at`

// Name identifies an entry, or another row whose revision a run has read. That has a Kind and no category.
type Name struct {
	Kind     string `json:"kind,omitempty"`
	Category string `json:"category"`
	Key      string `json:"key"`
}

// Get returns one entry, or [ErrNotFound].
func (o Owner) Get(ctx context.Context, db postgres.DB, category, key string) (Entry, error) {
	return postgres.RowOr[Entry](ctx, db, ErrNotFound, fmt.Sprintf("get memory %q", key), `
		select `+entryColumns+`
		  from agent_memory m
		 where owner = @owner and category = @category and key = @key
		   and (expires_at is null or expires_at > clock_timestamp())`,
		postgres.Strict{"owner": o, "category": category, "key": key})
}

// Named returns the entries of names, in order. It omits missing ones.
func (o Owner) Named(ctx context.Context, db postgres.DB, names ...Name) ([]Entry, error) {
	categories, keys := make([]string, len(names)), make([]string, len(names))
	for i, name := range names {
		categories[i], keys[i] = name.Category, name.Key
	}
	return postgres.Rows[Entry](ctx, db, "get named memories", `
		select `+entryColumns+`
		  from unnest(@categories::text[], @keys::text[]) with ordinality n (category, key, place)
		  join agent_memory m on m.owner = @owner and m.category = n.category and m.key = n.key
		 where m.expires_at is null or m.expires_at > clock_timestamp()
		 order by n.place`,
		postgres.Strict{"owner": o, "categories": categories, "keys": keys})
}

// GetID returns the entry with an id, or [ErrNotFound].
func GetID(ctx context.Context, db postgres.DB, id string) (Entry, error) {
	return postgres.RowOr[Entry](ctx, db, ErrNotFound, fmt.Sprintf("get memory %.60q", id), `
		select `+entryColumns+`
		  from agent_memory m
		 where id = lanekeeper.agent_uuid(@id) and (expires_at is null or expires_at > clock_timestamp())`,
		postgres.Strict{"id": id})
}

// Expire deletes the expired entries and returns how many. It also deletes up to 1,000 revisions of deleted keys, and
// as many decided conflicts, that are older than 90 days. Concurrent calls are safe.
func Expire(ctx context.Context, db postgres.DB) (int64, error) {
	tag, err := db.Exec(ctx, `
		delete from agent_memory
		 where id in (select id from agent_memory where expires_at <= statement_timestamp() for update skip locked)
		   and expires_at <= statement_timestamp() -- a concurrent write may have renewed it`)
	if err != nil {
		return 0, fmt.Errorf("expire memory: %w", err)
	}
	return tag.RowsAffected(), prune(ctx, db)
}

// prune deletes old revisions of deleted keys, and old decided conflicts.
func prune(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `
		with keys as (
		  delete from agent_memory_forgotten g
		   using (select o.owner, o.category, o.key from agent_memory_forgotten o
		           where o.forgotten_at < statement_timestamp() - interval '90 days' order by o.forgotten_at limit 1000
		             for update skip locked) old
		   where g.owner = old.owner and g.category = old.category and g.key = old.key)
		delete from agent_memory_conflicts c
		 using (select o.id from agent_memory_conflicts o
		         where o.status <> 'open' and o.decided_at < statement_timestamp() - interval '90 days'
		           order by o.decided_at limit 1000
		           for update skip locked) old
		 where c.id = old.id`)
	if err != nil {
		return fmt.Errorf("prune memory: %w", err)
	}
	return nil
}

// CategoryStats are the totals of a category.
type CategoryStats struct {
	Owner     Owner     `json:"agent,omitempty"` // owner of the memory
	Category  string    `json:"category"`
	Entries   int64     `json:"entries"`
	Bytes     int64     `json:"bytes"`    // of keys and values, as stored
	Expiring  int64     `json:"expiring"` // entries with an expiry
	UpdatedAt time.Time `json:"updated_at"`
}

// Stats returns totals by owner and category, sorted by name.
func Stats(ctx context.Context, db postgres.DB) ([]CategoryStats, error) {
	return postgres.Rows[CategoryStats](ctx, db, "count memory", `
		select owner, category, count(*) as entries, sum(octet_length(key) + pg_column_size(value))::bigint as bytes,
		       count(expires_at) as expiring, max(updated_at) as updated_at
		  from agent_memory where expires_at is null or expires_at > clock_timestamp()
		 group by owner, category order by owner, category`)
}
