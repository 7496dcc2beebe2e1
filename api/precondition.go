package api

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/memory"
)

// precondition is the state that a change expects.
type precondition struct {
	given    bool
	absent   bool // If-None-Match: *
	exists   bool // If-Match: *
	revision int  // If-Match: "3"
}

// readPrecondition parses If-Match and If-None-Match.
func (r request) readPrecondition() (precondition, error) {
	match, none := r.Header.Values("If-Match"), r.Header.Values("If-None-Match")
	switch {
	case len(match)+len(none) == 0:
		return precondition{}, nil
	case len(match)+len(none) > 1:
		return precondition{}, badPrecondition("send either If-Match or If-None-Match, once")
	case len(none) == 1:
		if strings.TrimSpace(none[0]) != "*" {
			return precondition{}, badPrecondition("If-None-Match is %.60q; use *", none[0])
		}
		return precondition{given: true, absent: true}, nil
	}
	tag := strings.TrimSpace(match[0])
	if tag == "*" {
		return precondition{given: true, exists: true}, nil
	}
	plain := strings.TrimPrefix(tag, "W/") // compressing proxies weaken tags
	number, err := strconv.Atoi(strings.Trim(plain, `"`))
	if err != nil || number < 1 || etag(number) != plain {
		return precondition{}, badPrecondition("If-Match is %.60q; use the ETag of a response, or *", match[0])
	}
	return precondition{given: true, revision: number}, nil
}

func badPrecondition(format string, args ...any) *problem.Problem {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-precondition", "Bad precondition")
}

// require rejects a change without a precondition.
func (p precondition) require() error {
	if p.given {
		return nil
	}
	return problem.New(http.StatusPreconditionRequired, "send If-Match with the ETag that you read, or "+
		"If-None-Match: * for a new object").Kind("precondition-required", "Precondition required")
}

// ifMatch returns the precondition of a route whose object must exist.
func (r request) ifMatch() (revision int, err error) {
	p, err := r.readPrecondition()
	if err == nil && p.absent {
		err = badPrecondition("If-None-Match: * is invalid here: the object must exist")
	}
	return p.revision, err
}

// memoryRevision converts the precondition for package memory. It calls read only for If-Match: *.
func (p precondition) memoryRevision(
	ctx context.Context, read func(ctx context.Context) (memory.Entry, error),
) (int, error) {
	switch {
	case p.absent:
		return memory.Absent, nil
	case !p.exists:
		return p.revision, nil
	}
	e, err := read(ctx)
	if err != nil {
		return 0, fmt.Errorf("read the object of If-Match: *: %w", err)
	}
	return e.Revision, nil
}

// etag formats a revision as an entity tag.
func etag(revision int) string { return `"` + strconv.Itoa(revision) + `"` }
