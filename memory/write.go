package memory

import (
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

const (
	maxName    = 255
	maxValue   = 64 << 10
	maxEntries = 5000 // per category
)

// unstorable are the SQLSTATEs of JSON that jsonb rejects.
var unstorable = []string{
	"22003", // numeric_value_out_of_range
	"22P02", // invalid_text_representation: half a surrogate pair
	"22P05", // untranslatable_character
	"23514", // check_violation: the value is longer as jsonb writes its numbers
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

// Absent is the revision of a [Note] whose caller found no entry.
const Absent = -1

// Save replaces the value and expiry under n's category and key, and returns the entry. It returns a [*ConflictError]
// if n names a revision and the entry has another or is gone; [ErrSecret] for a secret; [ErrFull] for a full
// category; [ErrInvalid] for an invalid note.
func Save(ctx context.Context, db postgres.DB, n Note) (Entry, error) {
	value, err := n.check()
	if err != nil {
		return Entry{}, fmt.Errorf("memory %q not saved: %w", n.Key, err)
	}
	if err := checkCapacity(ctx, db, n); err != nil {
		return Entry{}, fmt.Errorf("memory %q not saved: %w", n.Key, err)
	}
	e, err := n.write(ctx, db, value)
	switch refused, _ := errors.AsType[*pgconn.PgError](err); {
	case errors.Is(err, pgx.ErrNoRows):
		err = conflict(ctx, db, n.Owner, n.Category, n.Key, n.Revision, value)
	case postgres.IsCode(err, unstorable...):
		err = fmt.Errorf("%w: value: cannot be stored: %s", ErrInvalid, refused.Message)
	}
	if err != nil {
		return Entry{}, fmt.Errorf("memory %q not saved: %w", n.Key, err)
	}
	return e, nil
}

// write stores the value and returns the entry, or pgx.ErrNoRows if the key is not at the note's revision. An expired
// entry counts as none. A note with a revision is an update, because an insert could succeed after a concurrent
// deletion.
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
	// A trigger may raise the revision after the insert: that of a forgotten key continues. So returning would be wrong.
	b.Queue(`
		select `+entryColumns+`
		  from agent_memory m where owner = @owner and category = @category and key = @key`,
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

// Check returns the error of an invalid or secret note, which [Save] would return.
func (n Note) Check() error {
	_, err := n.check()
	return err
}

// check applies the defaults and returns the value as JSON.
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
	case strings.Contains(strings.ReplaceAll(string(value), `\\`, ""), `\u0000`): // jsonb cannot store it
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

// looksSecret reports whether package redact finds a secret in the key or the value. A value that already contains the
// marker of a secret is allowed.
func looksSecret(key string, value json.RawMessage) bool {
	const limit = 4 * maxValue // enough for any valid value, so redaction cuts none
	named := redact.JSON(map[string]json.RawMessage{key: value}, limit)
	plain, err := json.Marshal(map[string]json.RawMessage{key: value})
	return err != nil || strings.Count(string(named), redact.Marker) > strings.Count(string(plain), redact.Marker)
}

// checkCapacity rejects a new key in a full category.
func checkCapacity(ctx context.Context, db postgres.DB, n Note) error {
	var full bool
	err := db.QueryRow(ctx, `
		select count(*) >= @max and not exists (
		         select from agent_memory
		           where owner = @owner and category = @category and key = @key
		             and (expires_at is null or expires_at > clock_timestamp()))
		  from (select
		          from agent_memory
		         where owner = @owner and category = @category
		           and (expires_at is null or expires_at > clock_timestamp())
		         limit @max) entries`,
		postgres.Strict{"owner": n.Owner, "category": n.Category, "key": n.Key, "max": maxEntries}).Scan(&full)
	if err == nil && full {
		err = ErrFull
	}
	return err
}

// Forget deletes an entry and reports whether one existed. revision has the meaning of [Note].Revision: if the entry
// has another one, Forget deletes nothing and returns a [*ConflictError]. An expired entry counts as none.
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

// ForgetID deletes the entry with an id and returns it; [ErrNotFound] for a missing or expired one. If revision is
// not 0 and the entry has another one, ForgetID deletes nothing and returns a [*ConflictError].
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

// ConflictError reports a rejected write: the key is at another revision than its writer read.
type ConflictError struct {
	Owner         Owner
	Category, Key string
	Read          int             // the revision that the writer read; 0 or Absent for none
	Yours         json.RawMessage // the rejected value; nil for a deletion
	Theirs        *Entry          // the stored entry; nil for none
}

func (e *ConflictError) Error() string {
	read, current := "no entry", "there is no entry any more"
	if e.Read > 0 {
		read = fmt.Sprintf("revision %d", e.Read)
	}
	if e.Theirs != nil {
		current = fmt.Sprintf("revision %d is there (%s, written under %s at %s)", e.Theirs.Revision, clip(e.Theirs.Value),
			cmp.Or(e.Theirs.TraceID, "no trace"), e.Theirs.UpdatedAt.UTC().Format(time.RFC3339))
	}
	intended := "forget it"
	if e.Yours != nil {
		intended = "write " + clip(e.Yours)
	}
	return fmt.Sprintf("memory %.60q in %.60q is not as it was read: %s was read to %s, and %s; nothing was written",
		e.Key, e.Category, read, intended, current)
}

// Is makes a ConflictError an [ErrConflict].
func (e *ConflictError) Is(target error) bool { return target == ErrConflict }

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

// clip cuts a value for a message.
func clip(value json.RawMessage) string { return textcut.Text(string(value), 200) }
