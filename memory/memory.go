// Package memory stores what the agent keeps between runs: the table agent_memory.
//
// An entry is a JSON value under a category and a key. Each write increments the key's revision. A revision never
// repeats, even after deletion or expiry. A writer names the revision that it has read, or [Absent]. If the key is at
// another revision, nothing is written, and the [ConflictError] has both values. [Seen] is what a run has read. A
// rejected value whose writer has ended becomes a [Conflict], which an admin decides. Each entry names the trace of
// its last write.
//
// An entry belongs to an [Owner]: the shared memory, or one agent's. The owner is a part of the key, so one owner's
// entries cannot be read or changed through another.
//
// A value that looks like a secret (package redact) is rejected, because models and people read the memory. A
// category holds at most 5,000 entries. Concurrent writers may exceed that bound by their number.
//
// Reads ignore expired entries, by the database's clock; [Expire] deletes them. Search is PostgreSQL's full-text
// search without a language, because keys and values often hold names. It needs no extension.
//
// An [Index] adds semantic search, if an embedding model is configured and the extension vector is installed. Writers
// do not wait for the embedding server: [Index.Run] embeds entries later. A vector belongs to one revision of an
// entry and is deleted with it.
package memory

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/redact"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
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
	maxName         = 255
	maxValue        = 64 << 10
	defaultLimit    = 20
	maxLimit        = 1000
	maxEntries      = 5000 // per category
)

// Owner is the owner of a memory: an agent's name, or [Shared].
type Owner string

// Shared is the memory of all agents without their own.
const Shared Owner = ""

// Absent is the revision of a [Note] whose caller found no entry.
const Absent = -1

// ConflictError reports a rejected write: the key is at another revision than its writer read.
type ConflictError struct {
	Owner         Owner
	Category, Key string
	Read          int             // the revision that the writer read; 0 or Absent for none
	Yours         json.RawMessage // the rejected value; nil for a deletion
	Theirs        *Entry          // the stored entry; nil for none
}

func (e *ConflictError) Error() string {
	read, there := "no entry", "there is no entry any more"
	if e.Read > 0 {
		read = fmt.Sprintf("revision %d", e.Read)
	}
	if e.Theirs != nil {
		there = fmt.Sprintf("revision %d is there (%s, written under %s at %s)", e.Theirs.Revision, clip(e.Theirs.Value),
			cmp.Or(e.Theirs.TraceID, "no trace"), e.Theirs.UpdatedAt.UTC().Format(time.RFC3339))
	}
	wanted := "forget it"
	if e.Yours != nil {
		wanted = "write " + clip(e.Yours)
	}
	return fmt.Sprintf("memory %.60q in %.60q is not as it was read: %s was read to %s, and %s; nothing was written",
		e.Key, e.Category, read, wanted, there)
}

// Is makes a ConflictError an [ErrConflict].
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

// clip cuts a value for a message.
func clip(value json.RawMessage) string { return textcut.Text(string(value), 200) }

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

// Note is a value to store.
type Note struct {
	Owner    Owner         // owner of the memory; empty for the shared one
	Category string        // "general" when empty; at most 255 bytes
	Key      string        // at most 255 bytes
	Value    any           // encodes as at most 64 KiB of JSON, without NUL characters
	TTL      time.Duration // lifetime; 0 for no expiry
	TraceID  string        // trace of the writer
	Revision int           // the revision that the caller read, or Absent; 0 for any
}

// Save replaces the value and expiry under n's category and key, and returns the entry. It returns a [*ConflictError]
// if n names a revision and the entry has another or is gone; [ErrSecret] for a secret; [ErrFull] for a full
// category; [ErrInvalid] for an invalid note.
func Save(ctx context.Context, db postgres.DB, n Note) (Entry, error) {
	value, err := n.check()
	if err != nil {
		return Entry{}, fmt.Errorf("save memory %q: %w", n.Key, err)
	}
	if err := checkCapacity(ctx, db, n); err != nil {
		return Entry{}, fmt.Errorf("save memory %q: %w", n.Key, err)
	}
	e, err := n.write(ctx, db, value)
	if errors.Is(err, pgx.ErrNoRows) {
		err = conflict(ctx, db, n.Owner, n.Category, n.Key, n.Revision, value)
	}
	if err != nil {
		return Entry{}, fmt.Errorf("save memory %q: %w", n.Key, err)
	}
	return e, nil
}

// write returns no row if the key is not at the note's revision. An expired entry counts as none. A note with a
// revision is an update: an insert could succeed after a concurrent deletion.
func (n *Note) write(ctx context.Context, db postgres.DB, value json.RawMessage) (Entry, error) {
	args := postgres.Strict{
		"owner": n.Owner, "category": n.Category, "key": n.Key, "value": value, "trace_id": n.TraceID,
		"ttl": n.TTL.Seconds(), "if_revision": n.Revision,
	}
	var written bool
	var e Entry
	b := &pgx.Batch{}
	var write *pgx.QueuedQuery
	if n.Revision > 0 {
		write = b.Queue(`
		update agent_memory m
		   set value = @value::jsonb, trace_id = @trace_id, revision = m.revision + 1, updated_at = clock_timestamp(),
		       expires_at = clock_timestamp() + make_interval(secs => nullif(@ttl::float8, 0))
		 where m.owner = @owner and m.category = @category and m.key = @key and m.revision = @if_revision::int
		   and (m.expires_at is null or m.expires_at > clock_timestamp())`, args)
	} else {
		write = b.Queue(`
		insert into agent_memory as m (owner, category, key, value, trace_id, expires_at)
		values (@owner, @category, @key, @value::jsonb, @trace_id,
		  clock_timestamp() + make_interval(secs => nullif(@ttl::float8, 0)))
		on conflict (owner, category, key) do update
		   set value = excluded.value, trace_id = excluded.trace_id, expires_at = excluded.expires_at,
		       revision = m.revision + 1,
		       created_at = case when m.expires_at <= clock_timestamp() then clock_timestamp() else m.created_at end,
		       updated_at = clock_timestamp()
		 where @if_revision::int = 0 or m.expires_at <= clock_timestamp()`, args)
	}
	write.Exec(func(tag pgconn.CommandTag) error {
		written = tag.RowsAffected() > 0
		return nil
	})
	// The revision of a new row goes on from that of a forgotten one, after the insert.
	b.Queue(`
		select id, owner, category, key, value, revision, trace_id, expires_at, created_at, updated_at
		  from agent_memory where owner = @owner and category = @category and key = @key`,
		postgres.Strict{"owner": n.Owner, "category": n.Category, "key": n.Key}).Query(func(rows pgx.Rows) (err error) {
		e, err = pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Entry])
		return err
	})
	err := db.SendBatch(ctx, b).Close()
	if err == nil && !written {
		err = pgx.ErrNoRows
	}
	return e, err
}

// conflict returns the error of a rejected write, with the current entry.
func conflict(
	ctx context.Context, db postgres.DB, o Owner, category, key string, read int, yours json.RawMessage,
) error {
	c := &ConflictError{Owner: o, Category: category, Key: key, Read: read, Yours: yours}
	theirs, err := o.Get(ctx, db, category, key)
	switch {
	case err == nil:
		c.Theirs = &theirs
	case !errors.Is(err, ErrNotFound):
		return err
	}
	return c
}

func (n *Note) check() (json.RawMessage, error) {
	n.Category = cmp.Or(n.Category, defaultCategory)
	var problems fielderr.List
	for field, text := range map[string]string{"category": n.Category, "key": n.Key} {
		if strings.TrimSpace(text) == "" || len(text) > maxName || !postgres.IsText(text) {
			problems.Add(field, "must have 1 to %d bytes of UTF-8 and no NUL character", maxName)
		} else if strings.ContainsFunc(text, unicode.IsControl) {
			problems.Add(field, "%.60q has control characters; use none", text)
		}
	}
	if n.TTL < 0 {
		problems.Add("ttl", "must not be negative")
	}
	value, err := json.Marshal(n.Value)
	switch {
	case err != nil:
		problems.Add("value", "%w", err)
	case len(value) > maxValue:
		problems.Add("value", "has %d bytes of JSON; at most %d are kept", len(value), maxValue)
	case strings.Contains(strings.ReplaceAll(string(value), `\\`, ""), `\u0000`):
		problems.Add("value", "has a NUL character")
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, errors.Join(problems...))
	}
	if looksSecret(n.Key, value) {
		return nil, ErrSecret
	}
	return value, nil
}

// looksSecret reports whether redaction would change the key or the value.
func looksSecret(key string, value json.RawMessage) bool {
	const room = 4 * maxValue // length alone is no secret
	named := redact.JSON(map[string]json.RawMessage{key: value}, room)
	plain, err := json.Marshal(map[string]json.RawMessage{key: value})
	return err != nil || strings.Count(string(named), redact.Marker) > strings.Count(string(plain), redact.Marker)
}

// checkCapacity rejects a new key in a full category.
func checkCapacity(ctx context.Context, db postgres.DB, n Note) error {
	var full bool
	err := db.QueryRow(ctx, `
		select count(*) >= @most and not exists (
		         select from agent_memory where owner = @owner and category = @category and key = @key)
		  from (select from agent_memory
		         where owner = @owner and category = @category
		           and (expires_at is null or expires_at > clock_timestamp()) limit @most) held`,
		postgres.Strict{"owner": n.Owner, "category": n.Category, "key": n.Key, "most": maxEntries}).Scan(&full)
	if err == nil && full {
		err = ErrFull
	}
	return err
}

// Get returns one entry, or [ErrNotFound].
func (o Owner) Get(ctx context.Context, db postgres.DB, category, key string) (Entry, error) {
	return postgres.RowOr[Entry](ctx, db, ErrNotFound, fmt.Sprintf("get memory %q", key), `
		select id, owner, category, key, value, revision, trace_id, expires_at, created_at, updated_at
		  from agent_memory
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
		select m.id, m.owner, m.category, m.key, m.value, m.revision, m.trace_id, m.expires_at, m.created_at, m.updated_at
		  from unnest(@categories::text[], @keys::text[]) with ordinality n (category, key, place)
		  join agent_memory m on m.owner = @owner and m.category = n.category and m.key = n.key
		 where m.expires_at is null or m.expires_at > clock_timestamp()
		 order by n.place`,
		postgres.Strict{"owner": o, "categories": categories, "keys": keys})
}

// Expire deletes the expired entries and returns how many. Revisions of deleted keys, and decided conflicts, are
// deleted after 90 days. Concurrent calls are safe.
func Expire(ctx context.Context, db postgres.DB) (int64, error) {
	tag, err := db.Exec(ctx, `
		delete from agent_memory
		 where id in (select id from agent_memory where expires_at <= statement_timestamp() for update skip locked)
		   and expires_at <= statement_timestamp()`)
	if err != nil {
		return 0, fmt.Errorf("expire memory: %w", err)
	}
	return tag.RowsAffected(), prune(ctx, db)
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

// Name identifies an entry. Other rows with tracked revisions have a Kind and no category.
type Name struct {
	Kind     string `json:"kind,omitempty"`
	Category string `json:"category"`
	Key      string `json:"key"`
}

// Sight is a revision of a key that a run read; [Absent] if the key was empty.
type Sight struct {
	Name
	Revision int `json:"revision"`
}

// Seen is what a run has read. Its writes depend on it: a key that it has not read must be new.
type Seen map[Name]int

// Revision returns the revision for a [Note] about a key: the one that was read, or [Absent].
func (s Seen) Revision(category, key string) int {
	return cmp.Or(s[Name{Category: cmp.Or(category, defaultCategory), Key: key}], Absent)
}

// Add adds sights.
func (s Seen) Add(sights ...Sight) {
	for _, x := range sights {
		s[x.Name] = x.Revision
	}
}

// SightsIn returns the entries of an answer that end within its first upto bytes, which is the shown part. An answer
// is a JSON object with entries in the list "memories", or one in "theirs". Values are not searched.
func SightsIn(answer []byte, upto int) []Sight {
	var found []Sight
	for _, raw := range ShownIn(answer, upto, "memories") {
		var s Sight
		if json.Unmarshal(raw, &s) == nil && s.Key != "" {
			s.Kind = ""
			found = append(found, s)
		}
	}
	return found
}

// ShownIn returns the values of an answer's list, and its "theirs", that end within the answer's first upto bytes.
func ShownIn(answer []byte, upto int, list string) []json.RawMessage {
	var found []json.RawMessage
	decoder := json.NewDecoder(bytes.NewReader(answer))
	if token, err := decoder.Token(); err != nil || token != json.Delim('{') {
		return nil
	}
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return found
		}
		switch name {
		case list:
			if token, err := decoder.Token(); err != nil || token != json.Delim('[') {
				return found
			}
			for decoder.More() {
				if !readShown(decoder, upto, &found) {
					return found
				}
			}
			if _, err := decoder.Token(); err != nil {
				return found
			}
		case "theirs":
			if !readShown(decoder, upto, &found) {
				return found
			}
		default:
			if !readShown(decoder, 0, &found) {
				return found
			}
		}
	}
	return found
}

// readShown reads one value, which was shown if it ends within upto bytes; false at the end of the readable part.
func readShown(decoder *json.Decoder, upto int, found *[]json.RawMessage) bool {
	var raw json.RawMessage
	if decoder.Decode(&raw) != nil {
		return false
	}
	if decoder.InputOffset() <= int64(upto) {
		*found = append(*found, raw)
	}
	return true
}

// Forget deletes an entry and reports whether one existed. revision is that of a [Note]: at another revision it
// deletes nothing and returns a [*ConflictError]. With [Absent], an existing entry is a conflict.
func (o Owner) Forget(ctx context.Context, db postgres.DB, category, key string, revision int) (bool, error) {
	var expired bool
	err := db.QueryRow(ctx, `
		delete from agent_memory
		 where owner = @owner and category = @category and key = @key
		   and (@if_revision = 0 or revision = @if_revision or expires_at <= clock_timestamp())
		returning coalesce(expires_at <= clock_timestamp(), false)`,
		postgres.Strict{"owner": o, "category": category, "key": key, "if_revision": revision}).Scan(&expired)
	if errors.Is(err, pgx.ErrNoRows) {
		return false, o.revisionConflict(ctx, db, category, key, revision)
	}
	if err != nil {
		return false, fmt.Errorf("forget memory %q: %w", key, err)
	}
	return !expired, nil
}

// revisionConflict returns the conflict of an entry at another revision; nil if none exists.
func (o Owner) revisionConflict(ctx context.Context, db postgres.DB, category, key string, revision int) error {
	if revision == 0 {
		return nil
	}
	err := conflict(ctx, db, o, category, key, revision, nil)
	if c, ok := errors.AsType[*ConflictError](err); ok && c.Theirs == nil {
		return nil
	}
	return fmt.Errorf("forget memory %q: %w", key, err)
}

// ForgetID deletes the entry with an id and returns it; [ErrNotFound] for a missing or expired one. With a positive
// revision, an entry at another is kept, and the error is a [*ConflictError]. One of several callers deletes it.
func ForgetID(ctx context.Context, db postgres.DB, id string, revision int) (Entry, error) {
	rows, err := db.Query(ctx, `
		delete from agent_memory
		 where id = lanekeeper.agent_uuid(@id) and (expires_at is null or expires_at > clock_timestamp())
		   and (@if_revision = 0 or revision = @if_revision)
		returning id, owner, category, key, value, revision, trace_id, expires_at, created_at, updated_at`,
		postgres.Strict{"id": id, "if_revision": revision})
	if err != nil {
		return Entry{}, fmt.Errorf("forget memory %.60q: %w", id, err)
	}
	e, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Entry])
	if errors.Is(err, pgx.ErrNoRows) {
		if e, err = GetID(ctx, db, id); err == nil {
			err = &ConflictError{Owner: e.Owner, Category: e.Category, Key: e.Key, Read: revision, Theirs: &e}
		}
	}
	if err != nil {
		return Entry{}, fmt.Errorf("forget memory %.60q: %w", id, err)
	}
	return e, nil
}

// GetID returns the entry with an id, or [ErrNotFound].
func GetID(ctx context.Context, db postgres.DB, id string) (Entry, error) {
	return postgres.RowOr[Entry](ctx, db, ErrNotFound, fmt.Sprintf("get memory %.60q", id), `
		select id, owner, category, key, value, revision, trace_id, expires_at, created_at, updated_at
		  from agent_memory where id = lanekeeper.agent_uuid(@id) and (expires_at is null or expires_at > clock_timestamp())`,
		postgres.Strict{"id": id})
}

// prune deletes the revisions of long gone keys, and old decided conflicts.
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
