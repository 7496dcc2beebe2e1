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

// etag is a revision as an entity tag.
func etag(revision int) string { return `"` + strconv.Itoa(revision) + `"` }

// precondition is what a client says about the state that its change is based on.
type precondition struct {
	given    bool
	absent   bool // If-None-Match: * — there must be nothing
	exists   bool // If-Match: * — there must be something
	revision int  // If-Match: "3"
}

// basedOn reads If-Match and If-None-Match.
func (r request) basedOn() (precondition, error) {
	match, none := r.Header.Values("If-Match"), r.Header.Values("If-None-Match")
	switch {
	case len(match)+len(none) == 0:
		return precondition{}, nil
	case len(match)+len(none) > 1:
		return precondition{}, badPrecondition("give one of If-Match and If-None-Match, once")
	case len(none) == 1:
		if strings.TrimSpace(none[0]) != "*" {
			return precondition{}, badPrecondition("If-None-Match is %.60q; with a change it can be *", none[0])
		}
		return precondition{given: true, absent: true}, nil
	}
	tag := strings.TrimSpace(match[0])
	if tag == "*" {
		return precondition{given: true, exists: true}, nil
	}
	plain := strings.TrimPrefix(tag, "W/") // proxies that compress answers weaken tags
	number, err := strconv.Atoi(strings.Trim(plain, `"`))
	if err != nil || number < 1 || etag(number) != plain {
		return precondition{}, badPrecondition("If-Match is %.60q; it can be the ETag of an answer, or *", match[0])
	}
	return precondition{given: true, revision: number}, nil
}

func badPrecondition(format string, args ...any) *problem.Problem {
	return problem.New(http.StatusBadRequest, format, args...).Kind("bad-precondition", "Bad precondition")
}

// required refuses a change that does not say what it is based on.
func (p precondition) required() error {
	if p.given {
		return nil
	}
	return problem.New(http.StatusPreconditionRequired, "say what the change is based on: If-Match with the ETag of what you read, or "+
		"If-None-Match: * for what must be new").Kind("precondition-required", "Precondition required")
}

// known is the precondition of a route whose subject has to be there.
func (r request) known() (revision int, err error) {
	p, err := r.basedOn()
	if err == nil && p.absent {
		err = badPrecondition("If-None-Match: * does not go with this route: what it changes has to be there")
	}
	return p.revision, err
}

// ofMemory is the precondition as a memory's writer says it; read gives the entry where that has to be known.
func (p precondition) ofMemory(ctx context.Context, read func(ctx context.Context) (memory.Entry, error)) (int, error) {
	switch {
	case p.absent:
		return memory.Absent, nil
	case !p.exists:
		return p.revision, nil
	}
	e, err := read(ctx)
	if err != nil {
		return 0, fmt.Errorf("read what If-Match: * is about: %w", err)
	}
	return e.Revision, nil
}
