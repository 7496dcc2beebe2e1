package api

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/memory"
)

// memoryWrite is what an admin wants to be kept.
type memoryWrite struct {
	Value      json.RawMessage `json:"value"`
	TTLSeconds float64         `json:"ttl_seconds,omitempty"` // 0: for ever
	Reason     string          `json:"reason"`
}

func (b memoryWrite) check() error {
	const century = 100 * 365 * 24 * 3600
	switch {
	case len(b.Value) == 0:
		return badBody("value is missing")
	case b.TTLSeconds < 0 || b.TTLSeconds > century:
		return badBody("ttl_seconds can be 0, for ever, to %d", century)
	}
	return because{b.Reason}.check()
}

// conflictDecision is what an admin says to a conflict.
type conflictDecision struct {
	Decision string `json:"decision"` // keep, or take
	Reason   string `json:"reason"`
}

func (d conflictDecision) check() error {
	if d.Decision != "keep" && d.Decision != "take" {
		return badBody("decision is %.60q; it can be keep, what is there, or take, the late value", d.Decision)
	}
	return because{d.Reason}.check()
}

// remembering is what an admin does with the memory.
func (s *server) remembering() []route {
	return []route{
		{
			method: "GET", path: "/v1/memory/entries/{category}/{key}", answer: memory.Entry{}, handle: s.getMemory, versioned: true,
			params: []param{ofAgent},
			about:  "One entry of the memory. Its ETag is what a change is based on. Category and key are path-escaped.",
		}, {
			method: "PUT", path: "/v1/memory/entries/{category}/{key}", body: memoryWrite{}, answer: memory.Entry{}, handle: s.putMemory, versioned: true, guarded: true,
			params: []param{ofAgent},
			about:  "Keep a value under a key. If-Match with the ETag that was read, or If-None-Match: * for a new key, is required; 412 has both values.",
		}, {
			method: "DELETE", path: "/v1/memory/entries/{category}/{key}", body: because{}, answer: change{}, handle: s.deleteMemory, guarded: true,
			params: []param{ofAgent},
			about:  "Delete an entry for good. If-Match with the ETag that was read is required; 412 has what is there now.",
		}, {
			method: "POST", path: "/v1/memory/{id}/forget", body: because{}, answer: change{}, handle: s.forgetMemory, guarded: true,
			about: "Delete an entry of the memory for good, by its id. With If-Match only if it is as it was read.",
		}, {
			method: "GET", path: "/v1/memory/conflicts", answer: page[memory.Conflict]{}, handle: s.listMemoryConflicts,
			about: "What was not written, because its key had changed meanwhile and nobody was there any more to decide; newest first. Without status, what is open. " +
				"revision and current are what is there now.",
			params: listing(oneOf("status", "State of the conflict", memory.ConflictOpen, memory.ConflictKept, memory.ConflictTaken, "all")),
		}, {
			method: "POST", path: "/v1/memory/conflicts/{id}/decide", body: conflictDecision{}, answer: memory.Conflict{}, handle: s.decideMemoryConflict,
			conflicts: true, guarded: true, versioned: true,
			about: "Decide a conflict, once: keep what is there, or take the late value. That is written only if the key is at the revision that If-Match names, or, " +
				"without it, as it was when the conflict arose; otherwise 412, and the conflict stays open.",
		},
	}
}

// ofAgent is the parameter that says whose memory a request is about.
var ofAgent = text("agent", "The agent whose memory it is; the shared one when left out")

// owner is whose memory a request is about.
func (s *server) owner(r request) (memory.Owner, error) {
	owner, err := s.agents.MemoryOf(r.Context(), s.pool, r.query["agent"])
	if errors.Is(err, agents.ErrNotFound) || errors.Is(err, agents.ErrNoMemory) {
		err = badParameter("agent: %s", err)
	}
	return memory.Owner(owner), err
}

// entryIn is the owner, the category and the key that a request is about.
func (s *server) entryIn(r request) (owner memory.Owner, category, key string, err error) {
	category, key = r.PathValue("category"), r.PathValue("key")
	for _, text := range []string{category, key} {
		if !keepable(text) || len(text) > maxText {
			return "", "", "", memory.ErrNotFound
		}
	}
	owner, err = s.owner(r)
	return owner, category, key, err
}

func (s *server) getMemory(r request) (answer, error) {
	owner, category, key, err := s.entryIn(r)
	if err != nil {
		return answer{}, err
	}
	e, err := owner.Get(r.Context(), s.pool, category, key)
	return answer{body: e, revision: e.Revision, trace: e.TraceID}, err
}

// putMemory keeps a value, based on what the admin has read.
func (s *server) putMemory(r request) (answer, error) {
	owner, category, key, err := s.entryIn(r)
	if err != nil {
		return answer{}, err
	}
	based, err := r.basedOn()
	if err == nil {
		err = based.required()
	}
	if err != nil {
		return answer{}, err
	}
	said := r.body.(memoryWrite)
	var saved memory.Entry
	done, err := s.audited(r.Context(), "set_memory", said.Reason, memoryInput(owner, category, key),
		func(tx pgx.Tx, traceID string) (any, error) {
			revision, err := based.ofMemory(r.Context(), func(ctx context.Context) (memory.Entry, error) { return owner.Get(ctx, tx, category, key) })
			if err != nil {
				return nil, err
			}
			saved, err = memory.Save(r.Context(), tx, memory.Note{
				Owner: owner, Category: category, Key: key, Value: said.Value, TTL: time.Duration(said.TTLSeconds * float64(time.Second)),
				TraceID: traceID, Revision: revision,
			})
			return map[string]int{"revision": saved.Revision}, err
		})
	if err != nil {
		return answer{}, badMemory(err)
	}
	return answer{body: saved, revision: saved.Revision, trace: done.TraceID}, nil
}

// memoryInput is what the record of a change says.
func memoryInput(owner memory.Owner, category, key string) map[string]any {
	input := map[string]any{"category": category, "key": key}
	if owner != memory.Shared {
		input["agent"] = owner
	}
	return input
}

// badMemory is the client's mistake in what it wants to be kept.
func badMemory(err error) error {
	switch {
	case errors.Is(err, memory.ErrInvalid), errors.Is(err, memory.ErrSecret):
		return badBody("%s", err)
	case errors.Is(err, memory.ErrFull):
		return problem.New(http.StatusConflict, "%s", err).Kind("memory-full", "Memory full")
	}
	return err
}

func (s *server) deleteMemory(r request) (answer, error) {
	owner, category, key, err := s.entryIn(r)
	if err != nil {
		return answer{}, err
	}
	based, err := r.basedOn()
	if err == nil {
		err = based.required()
	}
	if err == nil && based.absent {
		err = badPrecondition("If-None-Match: * does not go with deleting")
	}
	if err != nil {
		return answer{}, err
	}
	return s.forget(r, func(tx pgx.Tx) (memory.Entry, error) {
		e, err := owner.Get(r.Context(), tx, category, key)
		if err != nil {
			return e, err
		}
		revision := based.revision
		if based.exists {
			revision = e.Revision
		}
		return memory.ForgetID(r.Context(), tx, e.ID, revision)
	})
}

// forgetMemory deletes an entry by its id.
func (s *server) forgetMemory(r request) (answer, error) {
	id, err := nameIn(r, memory.ErrNotFound)
	if err != nil {
		return answer{}, err
	}
	revision, err := r.known()
	if err != nil {
		return answer{}, err
	}
	return s.forget(r, func(tx pgx.Tx) (memory.Entry, error) { return memory.ForgetID(r.Context(), tx, id, revision) })
}

func (s *server) listMemoryConflicts(r request) (answer, error) {
	got, err := paged("memory conflicts", r.query, func(c memory.Conflict) string { return c.ID },
		func(before string, limit int) ([]memory.Conflict, error) {
			return memory.Conflicts(r.Context(), s.pool, memory.ConflictFilter{Status: r.query["status"], Before: before, Limit: limit})
		})
	return answer{body: got}, err
}

// decideMemoryConflict decides once.
func (s *server) decideMemoryConflict(r request) (answer, error) {
	id, err := uuidIn(r, "a memory conflict")
	if err != nil {
		return answer{}, err
	}
	based, err := r.basedOn()
	if err != nil {
		return answer{}, err
	}
	said := r.body.(conflictDecision)
	var decided memory.Conflict
	input := map[string]any{"conflict": id, "decision": said.Decision}
	done, err := s.audited(r.Context(), "decide_memory_conflict", said.Reason,
		input,
		func(tx pgx.Tx, traceID string) (any, error) {
			revision, err := based.ofMemory(r.Context(), func(ctx context.Context) (memory.Entry, error) {
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
				Take: said.Decision == "take", By: admin, Reason: said.Reason, IfRevision: revision, TraceID: traceID,
			})
			maps.Copy(input, memoryInput(decided.Owner, decided.Category, decided.Key))
			return map[string]any{"status": decided.Status, "revision": decided.Revision}, err
		})
	if err != nil {
		return answer{}, badMemory(err)
	}
	return answer{body: decided, revision: decided.Revision, trace: done.TraceID}, nil
}
