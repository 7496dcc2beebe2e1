package builtins

import (
	"context"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// maxPiece is how many bytes of a document one answer has.
const maxPiece = 16 << 10

type documentArgs struct {
	Document string `json:"document"`
	Offset   int64  `json:"offset"`
}

// paper is a document as the agent gets to see it.
type paper struct {
	ID          string `json:"id"`
	Name        string `json:"name"`
	ContentType string `json:"content_type"`
	Size        int64  `json:"size"`
	IsText      bool   `json:"is_text"`
}

// piece is a part of a document's text.
type piece struct {
	paper
	Text   string `json:"text"`
	Offset int64  `json:"offset"`
	Next   int64  `json:"next,omitempty"` // the offset of what follows; 0 after the last piece
	Note   string `json:"note,omitempty"`
}

// documentRead reads a piece of a document, or lists the documents that the run may read.
func documentRead(ctx context.Context, db postgres.DB, args documentArgs) (any, error) {
	span, _ := trace.From(ctx)
	if args.Document == "" {
		list, err := documents.Readable(ctx, db, span.ExecutionID, maxLimit)
		if err != nil {
			return nil, err
		}
		papers := make([]paper, len(list))
		for i, d := range list {
			papers[i] = paperOf(d)
		}
		return map[string]any{"documents": papers}, nil
	}
	d, err := documents.GetReadable(ctx, db, span.ExecutionID, args.Document)
	if err != nil {
		return nil, mistake(err, documents.ErrNotFound)
	}
	if !d.IsText {
		return piece{paper: paperOf(d), Note: "Its content is not text."}, nil
	}
	p, err := documents.Read(ctx, db, d.ID, args.Offset, maxPiece)
	if err != nil {
		return nil, mistake(err, documents.ErrNotFound)
	}
	return piece{paper: paperOf(d), Text: p.Text, Offset: p.Offset, Next: p.Next}, nil
}

func paperOf(d documents.Document) paper {
	return paper{ID: d.ID, Name: d.Name, ContentType: d.ContentType, Size: d.Size, IsText: d.IsText}
}
