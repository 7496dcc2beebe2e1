package documents

import (
	"context"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrBinary reports a document whose content is not text.
var ErrBinary = errors.New("the document is not text")

// Piece is a part of a document's text.
type Piece struct {
	Text   string
	Offset int64 // of its first byte
	Next   int64 // the offset of what follows; 0 after the last piece
	Size   int64 // of the document
}

// Read reads the text of a document from a byte on, at most so many bytes. The piece begins and ends at whole
// characters. [ErrBinary] when the document is not text.
func Read(ctx context.Context, db postgres.DB, id string, offset int64, most int) (Piece, error) {
	p := Piece{Offset: max(0, offset)}
	var readable bool
	var raw []byte
	err := db.QueryRow(ctx, `
		select size, is_text, case when is_text and @offset < size then substring(content from @offset::int + 1 for @most::int) end
		  from agent_documents where id = @id`,
		postgres.Strict{"id": id, "offset": min(p.Offset, 1<<30), "most": most}).Scan(&p.Size, &readable, &raw)
	switch {
	case errors.Is(err, pgx.ErrNoRows), postgres.IsCode(err, "22P02"):
		return p, fmt.Errorf("read document: %w", ErrNotFound)
	case err != nil:
		return p, fmt.Errorf("read document: %w", err)
	case !readable:
		return p, fmt.Errorf("read document: %w", ErrBinary)
	}
	text, skipped := whole(raw)
	p.Text, p.Offset = text, p.Offset+int64(skipped)
	if end := p.Offset + int64(len(text)); text != "" && end < p.Size {
		p.Next = end
	}
	return p, nil
}

// Send answers a request with a document. A browser saves it, whatever its type.
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
