// Package documents stores files that admins and visitors upload for the agent: the table agent_documents.
//
// The database stores the whole content with its SHA-256. [Upload.MaxBytes] bounds a document, [MaxPerThread] and
// [MaxThreadBytes] bound a thread. [Add] strips directories and control characters from names. It detects the type from
// the content; the extension and the client's type refine text/plain. Models and flows read text, which is valid UTF-8
// of a text type, in chunks. Binary documents expose only name, type and size.
//
// A document belongs to one thread or one execution and is deleted with it (package retention). An admin's document may
// belong to neither. An upload by a key or a visitor is unused until a message has it. Unused uploads expire.
//
// The activity of an upload has the name, the size and the SHA-256 ([Document.Audit]). Text that a model reads is part
// of its prompt and of the call's result, which are recorded and redacted like others.
package documents

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

var (
	// ErrNotFound reports an unknown document, or one of another owner.
	ErrNotFound = errors.New("no such document")
	// ErrTooLarge reports content above the limit, which the message names.
	ErrTooLarge = errors.New("the document is too large")
	// ErrTooMany reports that a thread, a chat key or a visitor has reached its limit of documents or images.
	ErrTooMany = errors.New("too many files")
	// ErrEmpty reports an upload without content.
	ErrEmpty = errors.New("the document is empty")
)

// The bounds of documents.
const (
	DefaultMaxBytes = 10 << 20
	MaxPerThread    = 100
	MaxThreadBytes  = 256 << 20
	// MaxUnused and MaxUnusedBytes bound the unused uploads of a chat key and its visitors together.
	MaxUnused      = 1000
	MaxUnusedBytes = 256 << 20
	// MaxVisitorUnused and MaxVisitorUnusedBytes bound the unused uploads of one visitor.
	MaxVisitorUnused      = 20
	MaxVisitorUnusedBytes = 10 * DefaultMaxBytes
	// UnusedTTL is the lifetime of an unused upload by a chat key. VisitorTTL is that of one by a visitor.
	UnusedTTL  = 24 * time.Hour
	VisitorTTL = time.Hour
)

// Document is a row without its content.
type Document struct {
	ID          string     `json:"id"`
	Name        string     `json:"name"`
	ContentType string     `json:"content_type"`
	Size        int64      `json:"size"`
	SHA256      string     `json:"sha256"`
	IsText      bool       `json:"is_text"` // whether models and flows can read it
	ThreadID    *string    `json:"thread_id"`
	ExecutionID *string    `json:"execution_id"`
	TraceID     string     `json:"trace_id"`
	UploadedBy  string     `json:"uploaded_by"` // admin, key NAME or visitor NAME
	CreatedAt   time.Time  `json:"created_at"`
	ExpiresAt   *time.Time `json:"expires_at"` // when an unused upload is deleted
}

// columns are the columns of a [Document], in order.
const columns = `id::text, name, content_type, size, encode(sha256, 'hex'), is_text, thread_id, execution_id::text,
	trace_id, case owner_kind when 'admin' then 'admin' else owner_kind || ' ' || owner end, created_at, expires_at`

// Upload is a document to store.
type Upload struct {
	Name        string
	ContentType string // as the client claims
	Content     []byte
	ThreadID    string // "" for none
	ExecutionID string // "" for none
	TraceID     string
	By          threads.Principal // an admin, a key or a visitor
	MaxBytes    int64             // [DefaultMaxBytes] when 0
}

// isUnused reports whether the upload expires unless a message uses it.
func (u Upload) isUnused() bool {
	return u.By.Kind != threads.ByAdmin && u.ThreadID == "" && u.ExecutionID == ""
}

// Add stores a document in the caller's transaction. It returns [ErrTooLarge], [ErrTooMany], [ErrEmpty], or
// [threads.ErrNotFound].
func Add(ctx context.Context, tx pgx.Tx, u Upload) (Document, error) {
	if u.MaxBytes <= 0 {
		u.MaxBytes = DefaultMaxBytes
	}
	switch size := int64(len(u.Content)); {
	case size == 0:
		return Document{}, ErrEmpty
	case size > u.MaxBytes:
		return Document{}, TooLarge(u.MaxBytes)
	}
	if err := checkQuota(ctx, tx, u); err != nil {
		return Document{}, err
	}
	ttl := UnusedTTL
	if u.By.Kind == threads.ByVisitor {
		ttl = VisitorTTL
	}
	name, sum := CleanName(u.Name), sha256.Sum256(u.Content)
	mediaType := contentType(name, u.ContentType, u.Content)
	rows, err := tx.Query(ctx, `
		insert into agent_documents (name, content_type, size, sha256, is_text, content, thread_id, execution_id, trace_id,
		                             owner_kind, owner, visitor, expires_at)
		values (@name, @type, @size, @sum, @is_text, @content, nullif(@thread, ''), nullif(@execution, '')::uuid, @trace,
		        @kind, @owner, @visitor, case when @unused then clock_timestamp() + make_interval(secs => @ttl) end)
		returning `+columns, postgres.Strict{
		"name": name, "type": mediaType, "size": len(u.Content), "sum": sum[:], "is_text": isText(mediaType, u.Content),
		"content": u.Content,
		"thread":  u.ThreadID, "execution": u.ExecutionID, "trace": u.TraceID, "kind": string(u.By.Kind),
		"owner": postgres.Text(u.By.Owner), "visitor": u.By.Proof, "unused": u.isUnused(), "ttl": ttl.Seconds(),
	})
	return collectOne(rows, err, "store document")
}

// TooLarge returns [ErrTooLarge] with the limit.
func TooLarge(maxBytes int64) error {
	return fmt.Errorf("%w: limit is %d bytes", ErrTooLarge, maxBytes)
}

// Get returns a document without its content.
func Get(ctx context.Context, db postgres.DB, id string) (Document, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_documents where id = @id`, postgres.Strict{"id": id})
	return collectOne(rows, err, fmt.Sprintf("read document %.60q", id))
}

// collectOne returns the document of a query, or [ErrNotFound].
func collectOne(rows pgx.Rows, err error, verb string) (Document, error) {
	return postgres.CollectOne(rows, err, ErrNotFound, verb, pgx.RowToStructByPos[Document])
}

// Content returns the content of a document.
func Content(ctx context.Context, db postgres.DB, id string) ([]byte, error) {
	var content []byte
	err := db.QueryRow(ctx, `select content from agent_documents where id = @id`, postgres.Strict{"id": id}).Scan(&content)
	if errors.Is(err, pgx.ErrNoRows) || postgres.IsCode(err, "22P02", "22021") {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read content of document: %w", err)
	}
	return content, nil
}

// Filter narrows [List]; the zero value lists the newest 50.
type Filter struct {
	ThreadID, ExecutionID string
	Before                string // an exclusive cursor: the id of a document; [List] returns older ones
	Limit                 int    // 50 when 0, at most 1000
}

// List returns documents without their content, newest first.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where (@thread = '' or thread_id = @thread) and (@execution = '' or execution_id = nullif(@execution, '')::uuid)
		   and (@before = '' or id < nullif(@before, '')::uuid)
		 order by id desc limit @limit`, postgres.Strict{
		"thread": postgres.Text(f.ThreadID), "execution": f.ExecutionID, "before": f.Before,
		"limit": postgres.PageSize(f.Limit, 50, 1000),
	})
	return postgres.Collect(rows, err, "list documents", pgx.RowToStructByPos[Document])
}

// Delete deletes a document and returns it.
func Delete(ctx context.Context, db postgres.DB, id string) (Document, error) {
	rows, err := db.Query(ctx, `delete from agent_documents where id = @id returning `+columns, postgres.Strict{"id": id})
	return collectOne(rows, err, "delete document")
}

// Audit returns the description of a document for an activity.
func (d Document) Audit() map[string]any {
	event := map[string]any{
		"document": d.ID, "name": d.Name, "content_type": d.ContentType, "size": d.Size,
		"sha256": d.SHA256,
	}
	if d.ThreadID != nil {
		event["thread_id"] = *d.ThreadID
	}
	return event
}

// maxName bounds a file name, in characters.
const maxName = 200

// unnamed is the name of a document without one.
const unnamed = "document"

// CleanName removes folders, control characters and invisible formatting from a file name.
func CleanName(name string) string {
	name = strings.ToValidUTF8(name, "")
	name = path.Base(strings.ReplaceAll(name, `\`, "/"))
	name = strings.TrimSpace(strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r) {
			return -1
		}
		return r
	}, name))
	if letters := []rune(name); len(letters) > maxName {
		ext := []rune(path.Ext(name))
		if len(ext) > 10 {
			ext = nil
		}
		name = string(letters[:maxName-len(ext)]) + string(ext)
	}
	if strings.Trim(name, "./ ") == "" {
		return unnamed
	}
	return name
}
