package documents

import (
	"context"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// ErrBinary reports a document that is not text.
var ErrBinary = errors.New("the document is not text")

// Chunk is a part of a document's text.
type Chunk struct {
	Text   string
	Offset int64 // of its first byte
	Next   int64 // the offset of the next chunk; 0 after the last one
	Size   int64 // of the document
}

// Read returns up to maxBytes bytes of a document's text from offset, cut at rune boundaries. maxBytes must be at least
// 2*[utf8.UTFMax]: a chunk without a whole character would end the reading. Read returns [ErrBinary] if the document is
// not text.
func Read(ctx context.Context, db postgres.DB, id string, offset int64, maxBytes int) (Chunk, error) {
	p := Chunk{Offset: max(0, offset)}
	var isText bool
	var raw []byte
	err := db.QueryRow(ctx, `
		select size, is_text,
		       case when is_text and @offset < size then substring(content from @offset::int + 1 for @max_bytes::int) end
		  from agent_documents where id = @id`,
		postgres.Strict{"id": id, "offset": min(p.Offset, 1<<30), "max_bytes": maxBytes}).Scan(&p.Size, &isText, &raw)
	switch {
	case errors.Is(err, pgx.ErrNoRows), postgres.IsCode(err, "22P02", "22021"): // id is not a UUID, or contains NUL
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

// trimPartialRunes trims partial UTF-8 sequences at both ends of raw. skipped is the number of bytes trimmed at its
// start.
func trimPartialRunes(raw []byte) (text string, skipped int) {
	for skipped < len(raw) && skipped < utf8.UTFMax && !utf8.RuneStart(raw[skipped]) {
		skipped++
	}
	raw = raw[skipped:]
	for n := 1; n < utf8.UTFMax && n <= len(raw); n++ {
		if last := raw[len(raw)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				raw = raw[:len(raw)-n]
			}
			break
		}
	}
	return string(raw), skipped
}
