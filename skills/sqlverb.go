package skills

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// ahead is what may stand before the first word of a statement: space, comments and brackets.
var ahead = regexp.MustCompile(`^(?:\s|--[^\n]*(?:\n|$)|/\*(?s:.*?)\*/|\()*`)

var word = regexp.MustCompile(`^[A-Za-z]+`)

// verb is the first word of a statement and where it stands, in bytes.
func verb(query string) (first string, at int) {
	at = len(ahead.FindString(query))
	return word.FindString(query[at:]), at
}

const onlyOne = "only one read-only query is possible: select, with, values or table; " +
	"to write to a named database, declare config.writes"

// checkVerb refuses a statement that is none of those a skill may make.
func (h sqlHandler) checkVerb() error {
	first, _ := verb(h.query)
	read := []string{"select", "with", "values", "table"}
	write := []string{"insert", "update", "delete", "merge"}
	switch lower := strings.ToLower(first); {
	case slices.Contains(read, lower), h.writes && slices.Contains(write, lower):
		return nil
	case h.writes:
		return fmt.Errorf("%q is not possible; write one insert, update, delete, merge, select or with", first)
	case slices.Contains(write, lower):
		return fmt.Errorf("%s; this begins with %s", onlyOne, lower)
	}
	if near := nearest.To(strings.ToLower(first), read); near != "" {
		return fmt.Errorf("%s; this begins with %q (did you mean %q?)", onlyOne, first, near)
	}
	return errors.New(onlyOne)
}
