package activity

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	defaultLimit = 50
	// MaxLimit bounds the rows of one page.
	MaxLimit = 500
)

// ToCursor encodes the id of the last row of a page. Clients treat it as opaque.
func ToCursor(id string) string {
	return base64.RawURLEncoding.EncodeToString([]byte(strings.ReplaceAll(id, "-", "")))
}

// CheckCursor returns an error that wraps ErrCursor if c is not a cursor. The empty cursor is valid.
func CheckCursor(c string) error {
	_, err := FromCursor(c)
	return err
}

// FromCursor decodes a cursor for SQL: null for the first page. The error wraps ErrCursor.
func FromCursor(c string) (any, error) {
	if c == "" {
		return nil, nil
	}
	hex, err := base64.RawURLEncoding.DecodeString(c)
	if err != nil || len(hex) != 32 || strings.Trim(string(hex), "0123456789abcdef") != "" {
		return nil, fmt.Errorf("read cursor %.60q: %w", c, ErrCursor)
	}
	return string(hex), nil
}

func pageSize(limit int) int { return postgres.PageSize(limit, defaultLimit, MaxLimit) }

func offsetCursor(n int) string { return ToCursor(fmt.Sprintf("%032x", n)) }

// offsetOf decodes a cursor; 0 for the first page.
func offsetOf(c string) (int, error) {
	hidden, err := FromCursor(c)
	if err != nil || hidden == nil {
		return 0, err
	}
	n, err := strconv.ParseUint(hidden.(string), 16, 31)
	if err != nil {
		return 0, fmt.Errorf("read cursor %.60q: %w", c, ErrCursor)
	}
	return int(n), nil
}
