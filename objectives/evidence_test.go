package objectives_test

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/objectives"
)

// act writes an activity and returns its id.
func act(t *testing.T, pool *pgxpool.Pool, traceID, skill, kind, status string) (id string) {
	t.Helper()
	return pgtest.Value[string](t, pool, `
		insert into agent_activity (trace_id, skill_name, kind, status, surface) values ($1, $2, $3, $4, 'heartbeat')
		  returning id::text`, traceID, skill, kind, status)
}

func TestOnlySuccessfulCallsOfTraceProveStep(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	early := act(t, pool, "hb_1", "look", "call", "success")
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"one", "two"}})
	list := steps(t, pool, o)
	visitor := act(t, pool, "hb_1", "look", "call", "success")
	pgtest.Exec(t, pool, `update agent_activity set surface = 'chat' where id = $1`, visitor)
	for name, proof := range map[string][]string{
		"nothing":             nil,
		"an unknown row":      {"01980000-0000-7000-8000-000000000000"},
		"pending approval":    {act(t, pool, "hb_1", "drop", "call", "pending_approval")},
		"skipped":             {act(t, pool, "hb_1", "drop", "call", "skipped")},
		"an error":            {act(t, pool, "hb_1", "drop", "call", "error")},
		"an unknown end":      {act(t, pool, "hb_1", "drop", "call", "unknown")},
		"one under way":       {act(t, pool, "hb_1", "drop", "call", "running")},
		"a note":              {act(t, pool, "hb_1", "advance_step", "note", "success")},
		"a phase":             {act(t, pool, "hb_1", "advance_plan", "phase", "success")},
		"a model call":        {act(t, pool, "hb_1", "model_call", "model", "success")},
		"the report itself":   {act(t, pool, "hb_1", "objective_advance", "call", "success")},
		"another trace's":     {act(t, pool, "hb_2", "look", "call", "success")},
		"older than the step": {early},
		"what a visitor did":  {visitor},
		"good and bad at once": {
			act(t, pool, "hb_1", "look", "call", "success"),
			act(t, pool, "hb_1", "drop", "call", "error"),
		},
	} {
		ok, err := objectives.CompleteStep(t.Context(), pool, list[0].ID, "done", "hb_1", proof)
		assert.Truef(t, !ok && errors.Is(err, objectives.ErrNoEvidence), "%s: %v, %v", name, ok, err)
	}
	good := act(t, pool, "hb_1", "look", "call", "success")
	ok, err := objectives.CompleteStep(t.Context(), pool, list[0].ID, "done", "hb_1", []string{good})
	assert.Truef(t, ok && err == nil, "a successful call does not count: %v, %v", ok, err)
	ok, err = objectives.CompleteStep(t.Context(), pool, list[1].ID, "done", "hb_1", []string{good})
	assert.Truef(t, !ok && errors.Is(err, objectives.ErrNoEvidence), "one call proved two steps: %v, %v", ok, err)
	if o := get(t, pool, "a"); o.Done != 1 || o.Total != 2 || o.Progress != 0.5 {
		t.Errorf("got %+v", o)
	}
	of, err := objectives.EvidenceOf(t.Context(), pool, o.ID)
	assert.Truef(t, err == nil && len(of) == 1 && *of[0].ActivityID == good && of[0].SkillName == "look",
		"got %+v, %v", of, err)
}

func TestSkillsNamedLikeBookkeepingProveSteps(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"one"}})
	proof := []string{act(t, pool, "hb_1", "skill_matrix", "call", "success")}
	ok, err := objectives.CompleteStep(t.Context(), pool, steps(t, pool, o)[0].ID, "done", "hb_1", proof)
	assert.Truef(t, ok && err == nil, "the call does not count: %v, %v", ok, err)
}

func TestDatabaseRejectsStepWithoutEvidence(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"one"}})
	step := steps(t, pool, o)[0]
	for _, sql := range []string{
		`update agent_objective_steps set status = 'done' where id = $1`,
		`insert into agent_objective_steps (objective_id, position, title, status)
		 select objective_id, 9, 'forged', 'done' from agent_objective_steps where id = $1`,
		`insert into agent_objective_evidence (step_id, activity_id) values ($1, lanekeeper.agent_uuid7())`,
	} {
		_, err := pool.Exec(t.Context(), sql, step.ID)
		assert.Truef(t, postgres.IsCode(err, "LK010"), "%s: %v", sql, err)
	}
	ok, err := objectives.ConfirmStep(t.Context(), pool, step.ID, "", "seen", "op_1")
	assert.True(t, !ok && err != nil, "a confirmation without a name was accepted")
	ok, err = objectives.ConfirmStep(t.Context(), pool, step.ID, "ana", "seen it myself", "op_1")
	assert.Truef(t, ok && err == nil, "an admin's confirmation was not accepted: %v, %v", ok, err)
	for _, sql := range []string{
		`delete from agent_objective_evidence where step_id = $1`,
		`update agent_objective_evidence set reason = 'x' where step_id = $1`,
	} {
		_, err := pool.Exec(t.Context(), sql, step.ID)
		assert.Truef(t, postgres.IsCode(err, "LK010"), "%s: %v", sql, err)
	}
	_, err = pool.Exec(t.Context(), `delete from agent_objectives where id = $1`, o.ID)
	assert.NoError(t, err, "an objective with evidence cannot be deleted")
}

func TestRoundNeedsNewEvidence(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"one"}, ReviewEvery: "1h"})
	step := steps(t, pool, o)[0]
	spare := act(t, pool, "hb_1", "look", "call", "success")
	complete(t, pool, step)
	_, err := objectives.Advanced(t.Context(), pool, o.ID, "hb_1")
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(),
		`update agent_objective_steps set status = 'done', trace_id = 'hb_1' where id = $1`,
		step.ID)
	assert.Truef(t, postgres.IsCode(err, "LK010"), "the last round's evidence was accepted: %v", err)
	ok, err := objectives.CompleteStep(t.Context(), pool, step.ID, "again", "hb_1", []string{spare})
	assert.Truef(t, !ok && errors.Is(err, objectives.ErrNoEvidence), "a call of the last round counts: %v, %v", ok, err)
}

func TestFindEvidenceMatchesSkillsOfTitle(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a", Steps: []string{"sizes, rows, lolo", "report", "look at locks"}})
	list := steps(t, pool, o)
	ids := map[string]string{}
	for _, skill := range []string{"locks", "sizes", "rows", "weather", "rows_all", "lo", ""} {
		ids[act(t, pool, "hb_1", skill, "call", "success")] = skill
	}
	find := func(n int) (found []string) {
		got, err := objectives.FindEvidence(t.Context(), pool, list[n].ID, objectives.EvidenceFilter{TraceID: "hb_1"})
		require.NoError(t, err)
		for _, id := range got {
			found = append(found, ids[id])
		}
		if len(got) > 0 {
			ok, err := objectives.CompleteStep(t.Context(), pool, list[n].ID, "r", "hb_1", got)
			require.True(t, ok && err == nil, ok, err)
		}
		return found
	}
	for _, step := range []struct {
		n    int
		want string
	}{{1, "[weather]"}, {0, "[sizes rows]"}, {2, "[locks]"}} {
		assert.Equal(t, step.want, fmt.Sprint(find(step.n)), step.n)
	}
}

func TestAdminDecidesProposal(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := objectives.Definition{Name: "tidy", Goal: "be tidy", SuccessCriteria: "no dust", Steps: []string{"sweep"}}
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			_, err := objectives.Propose(t.Context(), pool, d, "agent", "hb_1")
			assert.NoError(t, err)
		})
	}
	wg.Wait()
	o := get(t, pool, "tidy")
	assert.Truef(t, o.Status == objectives.Proposed && o.ProposedBy == "agent" && o.ProposedTrace == "hb_1" &&
		o.Total == 1, "got %+v", o)
	assert.Equal(t, "", due(t, pool))
	other := d
	other.Goal = "be untidy"
	_, err := objectives.Propose(t.Context(), pool, other, "agent", "hb_1")
	assert.ErrorIs(t, err, objectives.ErrNameTaken, "a proposal was replaced")
	for _, sql := range []string{
		`update agent_objectives set status = 'active' where id = $1`, `update agent_objectives set status = 'rejected'
			where id = $1`,
	} {
		_, err := pool.Exec(t.Context(), sql, o.ID)
		assert.Truef(t, postgres.IsCode(err, "23514"), "%s: %v", sql, err)
	}
	ok, err := objectives.SetStatus(t.Context(), pool, o.ID, objectives.Proposed, objectives.Active)
	assert.Truef(t, !ok && err == nil, "SetStatus decided: %v, %v", ok, err)
	var wins atomic.Int32
	for i := range 32 {
		wg.Go(func() {
			decide := objectives.Accept
			if i%2 == 0 {
				decide = objectives.Reject
			}
			if ok, err := decide(t.Context(), pool, "tidy", "ana", "why"); err != nil {
				t.Error(err)
			} else if ok {
				wins.Add(1)
			}
		})
	}
	wg.Wait()
	o = get(t, pool, "tidy")
	assert.Truef(t, o.DecidedBy == "ana" && wins.Load() >= 1 && wins.Load() <= 2 && o.Status == objectives.Active,
		"%d decisions, %+v", wins.Load(), o)
}

func TestDeclarationActivatesRejectedProposal(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	d := objectives.Definition{Name: "tidy", Goal: "be tidy"}
	_, err := objectives.Propose(t.Context(), pool, d, "agent", "hb_1")
	require.NoError(t, err)
	rejected, err := objectives.Reject(t.Context(), pool, "tidy", "ana", "too early")
	require.True(t, rejected && err == nil, rejected, err)
	o := put(t, pool, d)
	assert.Equal(t, objectives.Active, o.Status)
	assert.Equal(t, objectives.SourceWorkspace, o.DecidedBy)
	assert.Equal(t, "", o.DecidedReason, "the reason of the rejection stays")
}

func TestUndecidedProposalsAreBounded(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	var taken atomic.Int32
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			_, err := objectives.Propose(t.Context(), pool, objectives.Definition{Name: fmt.Sprint("o", i), Goal: "g"}, "agent",
				"hb_1")
			switch {
			case err == nil:
				taken.Add(1)
			case !errors.Is(err, objectives.ErrTooMany):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 20, taken.Load())
}

func TestConcurrentNotesHaveOneWinner(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	o := put(t, pool, objectives.Definition{Name: "a"})
	var wins atomic.Int32
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			_, err := objectives.SetNote(t.Context(), pool, "a", fmt.Sprint("note ", i), "hb_1", o.Revision)
			switch {
			case err == nil:
				wins.Add(1)
			case !errors.Is(err, objectives.ErrConflict):
				t.Error(err)
			}
		})
	}
	wg.Wait()
	assert.Equal(t, 1, wins.Load())
	got := get(t, pool, "a")
	assert.True(t, got.Note != "", "the note is empty")
	assert.Equal(t, o.Revision+1, got.Revision)
}
