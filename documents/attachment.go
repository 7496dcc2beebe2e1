package documents

import (
	"context"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// pieceSize bounds the bytes of a document that a response holds in memory.
	pieceSize = 64 << 10
	// pieceTimeout bounds the read of a piece.
	pieceTimeout = 10 * time.Second
)

// WriteAttachment writes a document as the response. It reads the content in pieces, so a slow client does not hold the
// whole content in memory. Content-Disposition: attachment keeps browsers from rendering it. If it returns an error, it
// has written nothing. A later failure aborts the response.
func WriteAttachment(ctx context.Context, w http.ResponseWriter, db postgres.DB, d Document) error {
	ctx = context.WithoutCancel(ctx) // the connection's write deadline ends the transfer
	piece, err := readPiece(ctx, db, d.ID, 0)
	if err != nil {
		return err
	}
	h := w.Header()
	h.Set("Content-Type", d.ContentType)
	h.Set("Content-Length", strconv.FormatInt(d.Size, 10))
	h.Set("Content-Disposition", mime.FormatMediaType("attachment", map[string]string{"filename": d.Name}))
	h.Set("X-Content-Type-Options", "nosniff")
	for next := int64(pieceSize); ; next += pieceSize {
		_, err := w.Write(piece)
		if err == nil && next >= d.Size {
			return nil
		}
		if err == nil {
			piece, err = readPiece(ctx, db, d.ID, next)
		}
		if err != nil {
			panic(http.ErrAbortHandler)
		}
	}
}

// readPiece returns the next bytes of a document's content, or [ErrNotFound].
func readPiece(ctx context.Context, db postgres.DB, id string, offset int64) (piece []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, pieceTimeout)
	defer cancel()
	err = db.QueryRow(ctx, `
		select substring(content from @offset::int + 1 for @size::int) from agent_documents where id = @id`,
		postgres.Strict{"id": id, "offset": offset, "size": pieceSize}).Scan(&piece)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("read content of document: %w", err)
	}
	return piece, nil
}
