package builtins

import (
	"context"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// DocumentRead is the builtin that reads documents.
const DocumentRead = "document_read"

type documentArgs struct {
	Document string  `json:"document"`
	Offset   float64 `json:"offset"` // 2.0 is an integer in JSON Schema
}

// documentView is the agent's view of a document.
type documentView struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	ContentType string `json:"content_type"`
	Size        int64  `json:"size"`
	IsText      bool   `json:"is_text"`
}

// maxPiece bounds the bytes of a document in one answer.
const maxPiece = 16 << 10

// piece is a part of a document's text.
type piece struct {
	documentView
	Text   string `json:"text"`
	Offset int64  `json:"offset"`
	Next   int64  `json:"next,omitempty"` // offset of the next piece; 0 after the last
	Note   string `json:"note,omitempty"`
}

// documentRead reads a piece of a document, or lists the documents that the run may read.
func documentRead(ctx context.Context, db postgres.DB, args documentArgs) (any, error) {
	span, _ := trace.From(ctx)
	if args.Document == "" {
		list, err := documents.ListReadable(ctx, db, span.ExecutionID, maxLimit)
		if err != nil {
			return nil, err
		}
		views := make([]documentView, len(list))
		for i, d := range list {
			views[i] = documentViewOf(d)
		}
		return map[string]any{"documents": views}, nil
	}
	d, err := documents.GetReadable(ctx, db, span.ExecutionID, args.Document)
	if err != nil {
		return nil, invalidIf(err, documents.ErrNotFound)
	}
	if !d.IsText {
		return piece{documentView: documentViewOf(d), Note: "Its content is not text."}, nil
	}
	p, err := documents.Read(ctx, db, d.ID, int64(args.Offset), maxPiece)
	if err != nil {
		return nil, invalidIf(err, documents.ErrNotFound)
	}
	return piece{documentView: documentViewOf(d), Text: p.Text, Offset: p.Offset, Next: p.Next}, nil
}

func documentViewOf(d documents.Document) documentView {
	return documentView{ID: d.ID, Name: d.Name, ContentType: d.ContentType, Size: d.Size, IsText: d.IsText}
}
