package documents

import (
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"strconv"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrBinary reports a document that is not text.
var ErrBinary = errors.New("the document is not text")

// Piece is a part of a document's text.
type Piece struct {
	Text   string
	Offset int64 // of its first byte
	Next   int64 // the offset of the next piece; 0 after the last one
	Size   int64 // of the document
}

// Read returns up to maxBytes of a document's text from an offset on, in whole characters. It returns [ErrBinary] if
// the document is not text.
func Read(ctx context.Context, db postgres.DB, id string, offset int64, maxBytes int) (Piece, error) {
	p := Piece{Offset: max(0, offset)}
	var isText bool
	var raw []byte
	err := db.QueryRow(ctx, `
		select size, is_text, case when is_text
		  and @offset < size then substring(content from @offset::int + 1 for @max_bytes::int) end
		  from agent_documents where id = @id`,
		postgres.Strict{"id": id, "offset": min(p.Offset, 1<<30), "max_bytes": maxBytes}).Scan(&p.Size, &isText, &raw)
	switch {
	case errors.Is(err, pgx.ErrNoRows), postgres.IsCode(err, "22P02", "22021"):
		return p, fmt.Errorf("read document: %w", ErrNotFound)
	case err != nil:
		return p, fmt.Errorf("read document: %w", err)
	case !isText:
		return p, fmt.Errorf("read document: %w", ErrBinary)
	}
	text, skipped := trimPartialRunes(raw)
	p.Text, p.Offset = text, p.Offset+int64(skipped)
	if end := p.Offset + int64(len(text)); text != "" && end < p.Size {
		p.Next = end
	}
	return p, nil
}

// trimPartialRunes trims partial UTF-8 sequences at both ends of a piece. skipped is the number of bytes trimmed at its
// start.
func trimPartialRunes(piece []byte) (text string, skipped int) {
	for skipped < len(piece) && skipped < utf8.UTFMax && !utf8.RuneStart(piece[skipped]) {
		skipped++
	}
	piece = piece[skipped:]
	for n := 1; n < utf8.UTFMax && n <= len(piece); n++ {
		if last := piece[len(piece)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				piece = piece[:len(piece)-n]
			}
			break
		}
	}
	return string(piece), skipped
}

// Send writes a document as the response. Browsers save every type as a file.
func Send(w http.ResponseWriter, d Document, content []byte) error {
	h := w.Header()
	h.Set("Content-Type", d.ContentType)
	h.Set("Content-Length", strconv.Itoa(len(content)))
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": d.Name}))
	h.Set("X-Content-Type-Options", "nosniff")
	if _, err := w.Write(content); err != nil {
		return fmt.Errorf("send document: %w", err)
	}
	return nil
}

// readableIDs selects the documents that @execution may read. A non-empty @id selects at most that one.
const readableIDs = `
	with recursive run as (
	  select x.id, x.parent_id, x.thread_id, x.surface, 0 as depth from agent_executions x
	    where x.id = nullif(@execution, '')::uuid
	  union all
	  select x.id, x.parent_id, x.thread_id, x.surface, r.depth + 1 from run r
	    join agent_executions x on x.id = r.parent_id where r.depth < 100)
	select d.id from run r join agent_documents d on d.thread_id = r.thread_id where r.depth = 0
	  and d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	select d.id from run r join agent_documents d on d.execution_id = r.id
	  where d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	select d.id from run r join agent_documents d on d.thread_id is null and d.execution_id is null
	  and d.owner_kind = 'admin'
	 where r.depth = 0 and r.thread_id is null and d.id = coalesce(lanekeeper.agent_uuid(@id), d.id)
	union
	select d.id from run r join agent_documents d on d.id = lanekeeper.agent_uuid(@id) where r.depth = 0
	  and r.surface = 'operate'`

// Readable returns up to limit documents that an execution may read, newest first: those of its thread, its own, and
// those of its ancestors. Without a thread it may read the admin's documents, too.
func Readable(ctx context.Context, db postgres.DB, execution string, limit int) ([]Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where id in (`+readableIDs+`) order by id desc limit @limit`,
		postgres.Strict{"execution": execution, "id": "", "limit": limit})
	return postgres.Collect(rows, err, "list documents of execution", pgx.RowToStructByPos[Document])
}

// GetReadable returns a document without its content, or [ErrNotFound] if the execution may not read it. An execution
// may read those of [Readable]; an operate session may read all.
func GetReadable(ctx context.Context, db postgres.DB, execution, id string) (Document, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_documents
		 where id = lanekeeper.agent_uuid(@id) and id in (`+readableIDs+`)`,
		postgres.Strict{"execution": execution, "id": postgres.Text(id)})
	return collectOne(rows, err, "read document")
}

// FormOverhead bounds the bytes of a form besides the file.
const FormOverhead = 64 << 10

// ErrForm reports a body without a file.
var ErrForm = errors.New("the body has no file")

// Form is an upload over HTTP: the file and the form's other fields.
type Form struct {
	Upload
	Fields map[string]string
}

// ReadForm reads an upload: a form (multipart/form-data) with one part named file or, if raw, the file itself without a
// name. It returns [ErrForm] or [ErrTooLarge].
func ReadForm(r *http.Request, maxBytes int64, raw bool) (Form, error) {
	mediaType, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	f := Form{Upload: Upload{ContentType: mediaType, MaxBytes: maxBytes}, Fields: map[string]string{}}
	switch {
	case err == nil && mediaType == "multipart/form-data" && params["boundary"] != "":
		return f, f.parts(multipart.NewReader(r.Body, params["boundary"]))
	case raw && (err != nil || mediaType != "multipart/form-data"):
		f.Content, err = readLimited(r.Body, maxBytes)
		return f, err
	}
	return f, fmt.Errorf("%w: send multipart/form-data with a part named file, of at most %d bytes", ErrForm, maxBytes)
}

func (f *Form) parts(form *multipart.Reader) error {
	for found := false; ; {
		part, err := form.NextPart()
		switch {
		case errors.Is(err, io.EOF) && found:
			return nil
		case errors.Is(err, io.EOF):
			return fmt.Errorf("%w: the form has no part named file", ErrForm)
		case err != nil:
			return fmt.Errorf("%w: %w", ErrForm, err)
		case part.FormName() == "file" && found:
			return fmt.Errorf("%w: the form has two parts named file", ErrForm)
		case part.FormName() == "file":
			found = true
			f.Name, f.ContentType = fileName(part), part.Header.Get("Content-Type")
			if f.Content, err = readLimited(part, f.MaxBytes); err != nil {
				return err
			}
			continue
		}
		value, err := readLimited(part, FormOverhead)
		if err != nil {
			return fmt.Errorf("%w: the field %.40q is too long", ErrForm, part.FormName())
		}
		f.Fields[part.FormName()] = string(value)
	}
}

// fileName returns the file name of a part. Browsers escape its quotes as in a URL.
func fileName(part *multipart.Part) string {
	name := part.FileName()
	if plain, err := url.PathUnescape(name); err == nil {
		return plain
	}
	return name
}

// readLimited reads all content, or returns [ErrTooLarge] if it exceeds maxBytes.
func readLimited(from io.Reader, maxBytes int64) ([]byte, error) {
	content, err := io.ReadAll(io.LimitReader(from, maxBytes+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrForm, err)
	case int64(len(content)) > maxBytes:
		return nil, TooLarge(maxBytes)
	}
	return content, nil
}
