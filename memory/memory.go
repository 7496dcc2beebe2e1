// Package memory is what the agent keeps from one run to the next: the table agent_memory.
//
// An entry is a JSON value under a category and a key. Saving again replaces the value and counts the
// revision; a caller that read before it writes names the revision it read, so that two runs
// never overwrite each other unseen. Each entry says under which trace it was last written.
//
// What looks like a secret (package redact) is not kept: a memory is read by models, shown to people and never rotated. A
// category holds at most 5,000 entries; that bound is looked at before each new key, so callers at the same
// moment may pass it by as many as they are.
//
// An entry may expire. An expired entry is gone from every read at that moment, by the database's
// clock; [Expire] only frees its room. Search is PostgreSQL's full-text search without a language
// (keys and values hold names as often as words), so it needs no extension.
package memory

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
)

var (
	// ErrNotFound reports an entry that does not exist, or has expired.
	ErrNotFound = errors.New("memory not found")
	// ErrConflict reports an entry that is not at the revision the caller read.
	ErrConflict = errors.New("memory was changed by somebody else; read it again")
	// ErrSecret reports a value, or a key, that is taken for a secret.
	ErrSecret = errors.New("this looks like a secret, and secrets are not remembered; keep where to find it instead")
	// ErrFull reports a category that holds all it may.
	ErrFull = errors.New("the category is full; forget something, or let entries expire")
	// ErrInvalid reports a note that no category can hold; the error says what is wrong with it.
	ErrInvalid = errors.New("invalid")
)

const (
	defaultCategory = "general"
	maxName         = 255
	maxValue        = 64 << 10
	defaultLimit    = 20
	maxLimit        = 1000
	maxEntries      = 5000 // of a category
)

// Absent as the revision of a [Note] says that the caller has seen no entry there.
const Absent = -1

// Entry is a row of agent_memory.
type Entry struct {
	ID        string          `json:"id"`
	Category  string          `json:"category"`
	Key       string          `json:"key"`
	Value     json.RawMessage `json:"value"`
	Revision  int             `json:"revision"`
	TraceID   string          `json:"trace_id"`
	ExpiresAt *time.Time      `json:"expires_at"` // nil: never
	CreatedAt time.Time       `json:"created_at"`
	UpdatedAt time.Time       `json:"updated_at"`
}

// Note is something to remember.
type Note struct {
	Category string        // "general" when empty; at most 255 bytes
	Key      string        // at most 255 bytes
	Value    any           // encodes as at most 64 KiB of JSON, without NUL characters
	TTL      time.Duration // how long it is kept; 0: for ever
	TraceID  string        // the work that learned it
	Revision int           // the revision the caller has read, or Absent; 0: whatever is there
}

// Save stores n in place of what its category and key hold, expiry included, and returns the entry. It
// is [ErrConflict] when n names a revision and the entry is at another, or gone; [ErrSecret] when n is taken for
// a secret; [ErrFull] when it would be one entry too many; [ErrInvalid] when n is not as [Note] says.
func Save(ctx context.Context, db postgres.DB, n Note) (Entry, error) {
	value, err := n.check()
	if err != nil {
		return Entry{}, fmt.Errorf("save memory %q: %w", n.Key, err)
	}
	if err := room(ctx, db, n); err != nil {
		return Entry{}, fmt.Errorf("save memory %q: %w", n.Key, err)
	}
	// An expired entry that still lies there counts as none: its revision begins anew.
	rows, err := db.Query(ctx, `
		insert into agent_memory as m (category, key, value, trace_id, expires_at)
		select @category, @key, @value::jsonb, @trace_id, clock_timestamp() + make_interval(secs => nullif(@ttl::float8, 0))
		 where @revision <= 0 or exists (select from agent_memory where category = @category and key = @key)
		on conflict (category, key) do update
		   set value = excluded.value, trace_id = excluded.trace_id, expires_at = excluded.expires_at,
		       revision = case when m.expires_at <= clock_timestamp() then 1 else m.revision + 1 end,
		       created_at = case when m.expires_at <= clock_timestamp() then clock_timestamp() else m.created_at end,
		       updated_at = clock_timestamp()
		 where @revision = 0
		    or @revision > 0 and m.revision = @revision and (m.expires_at is null or m.expires_at > clock_timestamp())
		    or @revision < 0 and m.expires_at <= clock_timestamp()
		returning id, category, key, value, revision, trace_id, expires_at, created_at, updated_at`,
		pgx.StrictNamedArgs{
			"category": n.Category, "key": n.Key, "value": value, "trace_id": n.TraceID, "ttl": n.TTL.Seconds(), "revision": n.Revision,
		})
	if err != nil {
		return Entry{}, fmt.Errorf("save memory %q: %w", n.Key, err)
	}
	e, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Entry])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrConflict
	}
	if err != nil {
		return Entry{}, fmt.Errorf("save memory %q: %w", n.Key, err)
	}
	return e, nil
}

func (n *Note) check() (json.RawMessage, error) {
	if n.Category == "" {
		n.Category = defaultCategory
	}
	var problems []error
	for field, text := range map[string]string{"category": n.Category, "key": n.Key} {
		if strings.TrimSpace(text) == "" || len(text) > maxName || strings.ContainsRune(text, 0) || !utf8.ValidString(text) {
			problems = append(problems, fmt.Errorf("%s: must have 1 to %d bytes of UTF-8 and no NUL character", field, maxName))
		}
	}
	if n.TTL < 0 {
		problems = append(problems, errors.New("ttl: must not be negative"))
	}
	value, err := json.Marshal(n.Value)
	switch {
	case err != nil:
		problems = append(problems, fmt.Errorf("value: %w", err))
	case len(value) > maxValue:
		problems = append(problems, fmt.Errorf("value: has %d bytes of JSON; at most %d are kept", len(value), maxValue))
	case strings.Contains(strings.ReplaceAll(string(value), `\\`, ""), `\u0000`):
		problems = append(problems, errors.New("value: has a NUL character"))
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, errors.Join(problems...))
	}
	if secret(n.Key, value) {
		return nil, ErrSecret
	}
	return value, nil
}

// secret reports whether anything would be taken out of the value, or its key, where it is shown.
func secret(key string, value json.RawMessage) bool {
	const room = 4 * maxValue // what is only long is no secret
	named := redact.JSON(map[string]json.RawMessage{key: value}, room)
	plain, err := json.Marshal(map[string]json.RawMessage{key: value})
	return err != nil || strings.Count(string(named), redact.Marker) > strings.Count(string(plain), redact.Marker)
}

// room refuses a new key in a full category.
func room(ctx context.Context, db postgres.DB, n Note) error {
	var full bool
	err := db.QueryRow(ctx, `
		select count(*) >= @most and not exists (select from agent_memory where category = @category and key = @key)
		  from (select from agent_memory
		         where category = @category and (expires_at is null or expires_at > clock_timestamp()) limit @most) held`,
		pgx.StrictNamedArgs{"category": n.Category, "key": n.Key, "most": maxEntries}).Scan(&full)
	if err == nil && full {
		err = ErrFull
	}
	return err
}

// Get returns one entry, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, category, key string) (Entry, error) {
	rows, err := db.Query(ctx, `
		select id, category, key, value, revision, trace_id, expires_at, created_at, updated_at
		  from agent_memory
		 where category = @category and key = @key and (expires_at is null or expires_at > clock_timestamp())`,
		pgx.StrictNamedArgs{"category": category, "key": key})
	if err != nil {
		return Entry{}, fmt.Errorf("get memory %q: %w", key, err)
	}
	e, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Entry])
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return Entry{}, fmt.Errorf("get memory %q: %w", key, err)
	}
	return e, nil
}

// Forget deletes an entry and reports whether there was one.
func Forget(ctx context.Context, db postgres.DB, category, key string) (bool, error) {
	var expired bool
	err := db.QueryRow(ctx, `
		delete from agent_memory where category = @category and key = @key
		returning coalesce(expires_at <= clock_timestamp(), false)`,
		pgx.StrictNamedArgs{"category": category, "key": key}).Scan(&expired)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("forget memory %q: %w", key, err)
	}
	return !expired, nil
}

// Expire deletes the entries whose time has come and returns how many. Any number of callers may
// run at once.
func Expire(ctx context.Context, db postgres.DB) (int64, error) {
	tag, err := db.Exec(ctx, `
		delete from agent_memory
		 where id in (select id from agent_memory where expires_at <= clock_timestamp() for update skip locked)
		   and expires_at <= clock_timestamp()`)
	if err != nil {
		return 0, fmt.Errorf("expire memory: %w", err)
	}
	return tag.RowsAffected(), nil
}

// CategoryStats is what one category holds.
type CategoryStats struct {
	Category  string    `json:"category"`
	Entries   int64     `json:"entries"`
	Bytes     int64     `json:"bytes"`    // of keys and values, as stored
	Expiring  int64     `json:"expiring"` // entries that have an expiry
	UpdatedAt time.Time `json:"updated_at"`
}

// Stats counts the entries by category, by name.
func Stats(ctx context.Context, db postgres.DB) ([]CategoryStats, error) {
	rows, err := db.Query(ctx, `
		select category, count(*) as entries, sum(octet_length(key) + pg_column_size(value))::bigint as bytes,
		       count(expires_at) as expiring, max(updated_at) as updated_at
		  from agent_memory where expires_at is null or expires_at > clock_timestamp()
		 group by category order by category`)
	if err != nil {
		return nil, fmt.Errorf("count memory: %w", err)
	}
	stats, err := pgx.CollectRows(rows, pgx.RowToStructByName[CategoryStats])
	if err != nil {
		return nil, fmt.Errorf("count memory: %w", err)
	}
	return stats, nil
}
