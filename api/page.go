package api

import (
	"encoding/base64"
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// page is the format of a listing.
type page[T any] struct {
	Items []T `json:"items"`
	// NextCursor leads to the next page; null after the last page.
	NextCursor *string `json:"next_cursor"`
}

// pageOf builds a page; next is empty after the last page.
func pageOf[T any](rows []T, next string) page[T] {
	p := page[T]{Items: rows}
	if rows == nil {
		p.Items = []T{}
	}
	if next != "" {
		p.NextCursor = &next
	}
	return p
}

func orEmpty[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

const (
	defaultPage = 50
	maxPage     = activity.MaxLimit
)

// readPage reads a page of a listing by id, newest first: see readPageByKey.
func readPage[T any](
	listing string, q query, id func(T) string, read func(before string, limit int) ([]T, error),
) (page[T], error) {
	if _, err := decodeIDCursor(listing, q["cursor"]); err != nil {
		return page[T]{}, err
	}
	return readPageByKey(listing, q, id, read)
}

// readPageByKey reads a page of a listing, and checks for a next page. The arguments of read are the key to continue
// after and the row count.
func readPageByKey[T any](
	listing string, q query, key func(T) string, read func(after string, limit int) ([]T, error),
) (page[T], error) {
	after, err := decodeCursor(listing, q["cursor"])
	if err != nil {
		return page[T]{}, err
	}
	rows, err := read(after, q.limit())
	if err != nil || len(rows) < q.limit() {
		return pageOf(rows, ""), err
	}
	last := key(rows[len(rows)-1])
	more, err := read(last, 1)
	if err != nil || len(more) == 0 {
		return pageOf(rows, ""), err
	}
	return pageOf(rows, encodeCursor(listing, last)), nil
}

// encodeCursor makes the key of a page's last row opaque. The listing's name prevents use elsewhere.
func encodeCursor(listing, key string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(listing + "\n" + key))
}

// decodeCursor returns the key; empty for the first page.
func decodeCursor(listing, cursor string) (string, error) {
	if cursor == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(cursor)
	key, matches := strings.CutPrefix(string(raw), listing+"\n")
	if err != nil || !matches || key == "" || !postgres.IsText(key) {
		return "", activity.ErrCursor
	}
	return key, nil
}

// decodeIDCursor is decodeCursor for listings by id.
func decodeIDCursor(listing, cursor string) (string, error) {
	id, err := decodeCursor(listing, cursor)
	if err != nil || (id != "" && !uuidForm.MatchString(id)) {
		return "", activity.ErrCursor
	}
	return id, nil
}
