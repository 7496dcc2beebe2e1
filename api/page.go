package api

import (
	"encoding/base64"
	"strings"

	"github.com/lanekeeper/lanekeeper/activity"
)

const (
	defaultPage = 50
	maxPage     = activity.MaxLimit
)

// page is the one shape of all listings.
type page[T any] struct {
	Items []T `json:"items"`
	// NextCursor leads to the next page; null after the last one.
	NextCursor *string `json:"next_cursor"`
}

// pageOf makes a page of rows and the cursor behind them, which is empty after the last page.
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

// seal hides the key of a page's last row, so that nobody relies on what it is. The listing's name keeps
// a cursor from being used elsewhere.
func seal(listing, key string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(listing + "\n" + key))
}

// unseal is the key that a cursor hides; empty for the first page.
func unseal(listing, cursor string) (string, error) {
	if cursor == "" {
		return "", nil
	}
	raw, err := base64.RawURLEncoding.DecodeString(cursor)
	key, ours := strings.CutPrefix(string(raw), listing+"\n")
	if err != nil || !ours || key == "" {
		return "", activity.ErrCursor
	}
	return key, nil
}

// unsealID is unseal for listings that go by an id.
func unsealID(listing, cursor string) (string, error) {
	id, err := unseal(listing, cursor)
	if err != nil || (id != "" && !uuidForm.MatchString(id)) {
		return "", activity.ErrCursor
	}
	return id, nil
}

// paged reads a page of a listing that goes by id, newest first, and looks whether there is another one.
// read takes the id after which to go on, and how many rows.
func paged[T any](listing string, q query, id func(T) string, read func(before string, limit int) ([]T, error)) (page[T], error) {
	before, err := unsealID(listing, q["cursor"])
	if err != nil {
		return page[T]{}, err
	}
	rows, err := read(before, q.limit())
	if err != nil || len(rows) < q.limit() {
		return pageOf(rows, ""), err
	}
	last := id(rows[len(rows)-1])
	more, err := read(last, 1)
	if err != nil || len(more) == 0 {
		return pageOf(rows, ""), err
	}
	return pageOf(rows, seal(listing, last)), nil
}
