package evals

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Shadow is a run that plays a share of the agent's turns as they complete.
type Shadow struct {
	RunID        string     `json:"run_id"`
	Share        float64    `json:"share"`
	Until        time.Time  `json:"until"`
	StoppedAt    *time.Time `json:"stopped_at"`
	Agent        string     `json:"agent"`
	Version      int        `json:"agent_version"`
	Model        string     `json:"model"`
	Status       string     `json:"status"` // status of the run; in a list its state, see [Shadow.state]
	Turns        int        `json:"turns"`
	SeenAt       time.Time  `json:"-"`
	VisibleUntil time.Time  `json:"-"` // turns that completed by then can be sampled
	Over         bool       `json:"-"` // stopped, or its time has passed
	Waits        bool       `json:"-"` // it runs, and no server plays it
}

const shadowColumns = `s.run_id::text, s.share, s.until, s.stopped_at, r.agent, r.agent_version as version, r.model, r.status,
	(select count(*)::int from agent_eval_trials t where t.run_id = r.id) as turns, s.seen_at,
	least(clock_timestamp() - interval '2 seconds', s.until, s.stopped_at) as visible_until, -- misses a slower commit
	s.stopped_at is not null or s.until <= clock_timestamp() as over,
	r.status = 'running' and r.served_until < clock_timestamp() as waits`

// state returns the state of a shadow whose run has the state reported.
func (s Shadow) state(reported string) string {
	switch {
	case s.Waits:
		return "waiting for a server"
	case s.Status == Running && s.Over:
		return "stopping"
	}
	return reported
}

// PutShadow makes a run a shadow that ends after duration.
func PutShadow(ctx context.Context, db postgres.DB, run string, share float64, duration time.Duration) error {
	_, err := db.Exec(ctx, `
		insert into agent_eval_shadows (run_id, share, until) values (@run, @share, clock_timestamp() + @lasts::interval)`,
		postgres.Strict{"run": run, "share": share, "lasts": duration})
	if err != nil {
		return fmt.Errorf("store a shadow: %w", err)
	}
	return nil
}

// Shadows lists the newest shadows.
func Shadows(ctx context.Context, db postgres.DB, limit int) ([]Shadow, error) {
	list, err := postgres.Rows[Shadow](ctx, db, "list shadows", `
		select `+shadowColumns+` from agent_eval_shadows s join agent_eval_runs r on r.id = s.run_id
		 order by s.run_id desc limit @limit`, postgres.Strict{"limit": limit})
	if err != nil {
		return nil, err
	}
	ids := make([]string, len(list))
	for i, s := range list {
		ids[i] = s.RunID
	}
	rows, err := db.Query(ctx, `
		select `+runColumns+` from agent_eval_runs where id = any (@ids::text[]::uuid[]) order by id desc`,
		postgres.Strict{"ids": ids})
	runs, err := postgres.Collect(rows, err, "read the runs of shadows", pgx.RowToStructByPos[Run])
	if err != nil {
		return nil, err
	}
	reports, err := Outcomes(ctx, db, runs)
	for i := range reports { // reports and list have the same order
		list[i].Status = list[i].state(reports[i].State())
	}
	return list, err
}

// GetShadow reads the shadow of a run, or returns [ErrNotFound].
func GetShadow(ctx context.Context, db postgres.DB, run string) (Shadow, error) {
	return postgres.RowOr[Shadow](ctx, db, ErrNotFound, "read shadow "+run, `
		select `+shadowColumns+` from agent_eval_shadows s join agent_eval_runs r on r.id = s.run_id where r.id = @run`,
		postgres.Strict{"run": run})
}

// StopShadow ends a shadow, and records the caller. It returns [ErrNotFound] for a run that is not a running shadow.
func StopShadow(ctx context.Context, db postgres.Beginner, run string) error {
	act := activity.Act{Name: "stop_shadow", Input: map[string]any{"run": run}}
	_, err := activity.Record(ctx, db, act, func(tx pgx.Tx, _ string) (any, error) {
		tag, err := tx.Exec(ctx, `
			update agent_eval_shadows s set stopped_at = clock_timestamp() from agent_eval_runs r
			 where s.run_id = @run and r.id = s.run_id and r.status = 'running' and s.stopped_at is null`,
			postgres.Strict{"run": run})
		if err == nil && tag.RowsAffected() == 0 {
			err = ErrNotFound
		}
		return nil, err
	})
	if err != nil {
		return fmt.Errorf("stop shadow %s: %w", run, err)
	}
	return nil
}

// Extend adds recorded turns that completed after s.SeenAt, with a trial of each for a shadow and its control. It sets
// SeenAt to s.VisibleUntil. It does nothing if another process has changed SeenAt meanwhile.
func Extend(ctx context.Context, db postgres.Beginner, r Run, more Sample, s Shadow) error {
	err := postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, `
			update agent_eval_shadows set seen_at = @upto where run_id = @run and seen_at = @seen`,
			postgres.Strict{"upto": s.VisibleUntil, "seen": s.SeenAt, "run": r.ID})
		if err != nil || tag.RowsAffected() == 0 || more.Size == 0 {
			return err
		}
		return addTurns(ctx, tx, r, more)
	})
	if err != nil {
		return fmt.Errorf("extend a shadow: %w", err)
	}
	return nil
}

// addTurns adds turns to the sample of a run. The caller must have locked the shadow's row.
func addTurns(ctx context.Context, tx pgx.Tx, r Run, more Sample) error {
	sample, err := readSample(ctx, tx, r)
	if err != nil {
		return err
	}
	if sample.Skipped == nil {
		sample.Skipped = map[string]int{}
	}
	for why, n := range more.Skipped {
		sample.Skipped[why] += n
	}
	sampleUpdate, err := json.Marshal(map[string]any{"size": sample.Size + more.Size, "skipped": sample.Skipped})
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		update agent_evals e
		   set definition = jsonb_set(e.definition, '{sample}', e.definition -> 'sample' || @counts::jsonb
		       || jsonb_build_object('turns', (e.definition -> 'sample' -> 'turns') || @turns::jsonb))
		 where e.name = @suite and e.version = @version`, postgres.Strict{
		"counts": string(sampleUpdate), "turns": more.Turns, "suite": r.Suite, "version": r.Version,
	})
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		insert into agent_eval_trials (run_id, case_name, trial, position)
		select x.id, c.name, 1, (select count(*) from agent_eval_trials t where t.run_id = x.id) + c.n
		  from unnest(array[@control, @run]::uuid[]) x (id), unnest(@names::text[]) with ordinality c (name, n)
		on conflict do nothing`, postgres.Strict{
		"control": r.ControlID, "run": r.ID, "names": slices.Collect(maps.Keys(more.Turns)),
	})
	return err
}
