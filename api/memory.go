package api

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/memory"
)

func (s *server) memoryRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/memory", response: page[memory.Entry]{}, handle: s.listMemory,
			about: "Memories, newest first; with q the best matches on one page.",
			params: listParams(textParam("category", "Only this category"), textParam("prefix", "Prefix of the key"), traceParam,
				textParam("q", "A search query, in the shared memory or that of agent"),
				textParam("agent", "Only this agent's memory")),
		}, {
			method: "GET", path: "/v1/memory/entries/{category}/{key}", response: memory.Entry{},
			handle: s.getMemory, hasETag: true,
			params: []param{agentParam},
			about:  "One entry of the memory. Its ETag is the precondition of a change. Category and key are path-escaped.",
		}, {
			method: "PUT", path: "/v1/memory/entries/{category}/{key}", body: memoryWrite{}, response: memory.Entry{},
			handle: s.putMemory, hasETag: true, ifMatch: true, conflicts: true,
			params: []param{agentParam},
			about: "Store a value under a key. Requires If-Match with the ETag, or If-None-Match: * for a new key; 412 " +
				"returns both values.",
		}, {
			method: "DELETE", path: "/v1/memory/entries/{category}/{key}", body: reasonRequest{}, response: change{},
			handle: s.deleteMemory, ifMatch: true,
			params: []param{agentParam},
			about:  "Delete an entry permanently. Requires If-Match with the ETag; 412 returns the current value.",
		}, {
			method: "POST", path: "/v1/memory/{id}/forget", body: reasonRequest{}, response: change{},
			handle: s.forgetMemory, ifMatch: true,
			about: "Delete an entry of the memory permanently by id, optionally with If-Match.",
		}, {
			method: "GET", path: "/v1/memory/conflicts", response: page[memory.Conflict]{}, handle: s.listMemoryConflicts,
			about: "Writes rejected because their key had changed, newest first. Default the open ones. " +
				"revision and current show the stored value.",
			params: listParams(enumParam("status", "State of the conflict", memory.ConflictOpen, memory.ConflictKept,
				memory.ConflictTaken, "all")),
		}, {
			method: "POST", path: "/v1/memory/conflicts/{id}/decide", body: conflictDecision{}, response: memory.Conflict{},
			handle:    s.decideMemoryConflict,
			conflicts: true, ifMatch: true, hasETag: true,
			about: "Decide a conflict once: keep the stored value, or take the late value if the key is at the " +
				"revision of If-Match, default that of the conflict; otherwise 412, and the conflict stays open.",
		},
	}
}

// listMemory lists entries, or searches them if q is set. A search has one page, because its order has no stable
// cursor.
func (s *server) listMemory(r request) (response, error) {
	if q := r.query["q"]; q != "" {
		for _, other := range []string{"cursor", "category", "prefix", "trace_id"} {
			if r.query[other] != "" {
				return response{}, problem.BadParameter("q cannot be combined with %s", other)
			}
		}
		owner, err := s.owner(r)
		if err != nil {
			return response{}, err
		}
		found, err := s.memory.Search(r.Context(), s.pool, owner, q, r.query.limit())
		return response{body: pageOf(found, "")}, err
	}
	var only *memory.Owner
	if r.query["agent"] != "" {
		owner, err := s.owner(r)
		if err != nil {
			return response{}, err
		}
		only = &owner
	}
	listing, err := readPage("memory", r.query, func(e memory.Entry) string { return e.ID },
		func(before string, limit int) ([]memory.Entry, error) {
			return memory.List(r.Context(), s.pool, memory.Filter{
				Owner: only, Category: r.query["category"], Prefix: r.query["prefix"], TraceIDs: r.query.traceIDs(),
				Before: before, Limit: limit,
			})
		})
	return response{body: listing}, err
}

type memoryWrite struct {
	Value      json.RawMessage `json:"value"`
	TTLSeconds float64         `json:"ttl_seconds,omitempty" doc:"0 means for ever"`
	Reason     string          `json:"reason"`
}

func (b memoryWrite) check() error {
	const century = 100 * 365 * 24 * 3600
	switch {
	case len(b.Value) == 0:
		return problem.BadBody("value is missing")
	case b.TTLSeconds < 0 || b.TTLSeconds > century:
		return problem.BadBody("ttl_seconds must be 0 (for ever) to %d", century)
	}
	return reasonRequest{b.Reason}.check()
}

var conflictDecisions = []string{"keep", "take"}

type conflictDecision struct {
	Decision string `json:"decision"`
	Reason   string `json:"reason"`
}

func (d conflictDecision) check() error {
	if !slices.Contains(conflictDecisions, d.Decision) {
		return problem.BadBody("decision is %.60q; use keep (the stored value) or take (the late value)", d.Decision)
	}
	return reasonRequest{d.Reason}.check()
}

// agentParam selects the owner of a memory.
var agentParam = textParam("agent", "The owner of the memory; default the shared memory")

func (s *server) owner(r request) (memory.Owner, error) {
	owner, err := s.agents.MemoryOf(r.Context(), s.pool, r.query["agent"])
	if errors.Is(err, agents.ErrNotFound) || errors.Is(err, agents.ErrNoMemory) {
		err = problem.BadParameter("agent: %s", err)
	}
	return memory.Owner(owner), err
}

// pathEntry returns the owner, category and key of a request.
func (s *server) pathEntry(r request) (owner memory.Owner, category, key string, err error) {
	category, key = r.PathValue("category"), r.PathValue("key")
	for _, text := range []string{category, key} {
		if !postgres.IsText(text) || len(text) > maxText {
			return "", "", "", memory.ErrNotFound
		}
	}
	owner, err = s.owner(r)
	return owner, category, key, err
}

func (s *server) getMemory(r request) (response, error) {
	owner, category, key, err := s.pathEntry(r)
	if err != nil {
		return response{}, err
	}
	e, err := owner.Get(r.Context(), s.pool, category, key)
	return response{body: e, revision: e.Revision, trace: e.TraceID}, err
}

// putMemory stores a value under optimistic locking.
func (s *server) putMemory(r request) (response, error) {
	owner, category, key, err := s.pathEntry(r)
	if err != nil {
		return response{}, err
	}
	expected, err := r.readPrecondition()
	if err == nil {
		err = expected.require()
	}
	if err != nil {
		return response{}, err
	}
	body := r.body.(memoryWrite)
	var saved memory.Entry
	done, err := s.record(r.Context(), "set_memory", body.Reason, memoryInput(owner, category, key),
		func(tx pgx.Tx, traceID string) (any, error) {
			revision, err := expected.memoryRevision(r.Context(),
				func(ctx context.Context) (memory.Entry, error) { return owner.Get(ctx, tx, category, key) })
			if err != nil {
				return nil, err
			}
			saved, err = memory.Save(r.Context(), tx, memory.Note{
				Owner: owner, Category: category, Key: key, Value: body.Value,
				TTL:     time.Duration(body.TTLSeconds * float64(time.Second)),
				TraceID: traceID, Revision: revision,
			})
			return map[string]int{"revision": saved.Revision}, err
		})
	if err != nil {
		return response{}, memoryError(err)
	}
	return response{body: saved, revision: saved.Revision, trace: done.TraceID}, nil
}

// memoryInput describes a change of memory for its record.
func memoryInput(owner memory.Owner, category, key string) map[string]any {
	input := map[string]any{"category": category, "key": key}
	if owner != memory.Shared {
		input["agent"] = owner
	}
	return input
}

// memoryError maps invalid values to problems.
func memoryError(err error) error {
	switch {
	case errors.Is(err, memory.ErrInvalid), errors.Is(err, memory.ErrSecret):
		return problem.BadBody("%s", err)
	case errors.Is(err, memory.ErrFull):
		return problem.New(http.StatusConflict, "%s", err).Kind("memory-full", "Memory full")
	}
	return valueError(err)
}

// deleteMemory deletes an entry if it has the revision of If-Match, which is required; * accepts any revision.
func (s *server) deleteMemory(r request) (response, error) {
	owner, category, key, err := s.pathEntry(r)
	if err != nil {
		return response{}, err
	}
	expected, err := r.readPrecondition()
	if err == nil {
		err = expected.require()
	}
	if err == nil && expected.absent {
		err = badPrecondition("If-None-Match: * is invalid for a deletion")
	}
	if err != nil {
		return response{}, err
	}
	return s.forget(r, func(tx pgx.Tx) (memory.Entry, error) {
		e, err := owner.Get(r.Context(), tx, category, key)
		if err != nil {
			return e, err
		}
		revision := expected.revision
		if expected.exists {
			revision = e.Revision
		}
		return memory.ForgetID(r.Context(), tx, e.ID, revision)
	})
}

func (s *server) forgetMemory(r request) (response, error) {
	id, err := pathName(r, memory.ErrNotFound)
	if err != nil {
		return response{}, err
	}
	revision, err := r.ifMatch()
	if err != nil {
		return response{}, err
	}
	return s.forget(r, func(tx pgx.Tx) (memory.Entry, error) { return memory.ForgetID(r.Context(), tx, id, revision) })
}

func (s *server) listMemoryConflicts(r request) (response, error) {
	conflicts, err := readPage("memory conflicts", r.query, func(c memory.Conflict) string { return c.ID },
		func(before string, limit int) ([]memory.Conflict, error) {
			return memory.Conflicts(r.Context(), s.pool, memory.ConflictFilter{
				Status: r.query["status"],
				Before: before, Limit: limit,
			})
		})
	return response{body: conflicts}, err
}

// decideMemoryConflict takes or rejects the value of a conflict. If-Match names the revision of the disputed entry.
func (s *server) decideMemoryConflict(r request) (response, error) {
	id, err := pathUUID(r, "a memory conflict")
	if err != nil {
		return response{}, err
	}
	expected, err := r.readPrecondition()
	if err != nil {
		return response{}, err
	}
	body := r.body.(conflictDecision)
	var decided memory.Conflict
	input := map[string]any{"conflict": id, "decision": body.Decision}
	done, err := s.record(r.Context(), "decide_memory_conflict", body.Reason,
		input,
		func(tx pgx.Tx, traceID string) (any, error) {
			revision, err := expected.memoryRevision(r.Context(), func(ctx context.Context) (memory.Entry, error) {
				c, err := memory.GetConflict(ctx, tx, id)
				if err != nil {
					return memory.Entry{}, err
				}
				return c.Owner.Get(ctx, tx, c.Category, c.Key)
			})
			if err != nil {
				return nil, err
			}
			decided, err = memory.Decide(r.Context(), tx, id, memory.Decision{
				Take: body.Decision == "take", By: actorName(r.Context()), Reason: body.Reason,
				IfRevision: revision, TraceID: traceID,
			})
			maps.Copy(input, memoryInput(decided.Owner, decided.Category, decided.Key))
			return map[string]any{"status": decided.Status, "revision": decided.Revision}, err
		})
	if err != nil {
		return response{}, memoryError(err)
	}
	return response{body: decided, revision: decided.Revision, trace: done.TraceID}, nil
}

// forget deletes an entry. The audit row keeps category and key, but not the value.
func (s *server) forget(r request, fn func(tx pgx.Tx) (memory.Entry, error)) (response, error) {
	input := map[string]any{}
	var deleted memory.Entry
	done, err := s.record(r.Context(), "forget_memory", r.body.(reasonRequest).Reason, input,
		func(tx pgx.Tx, _ string) (_ any, err error) {
			deleted, err = fn(tx)
			input["id"] = deleted.ID
			maps.Copy(input, memoryInput(deleted.Owner, deleted.Category, deleted.Key))
			return map[string]bool{"changed": true}, err
		})
	if err != nil {
		return response{}, err
	}
	done.Name, done.Changed = deleted.Key, true
	return response{body: done, trace: done.TraceID}, nil
}
