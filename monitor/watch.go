package monitor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/logging"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// CheckEvery is the interval between two checks. All processes share it.
const CheckEvery = 10 * time.Second

// Watch queues verdict.changed and budget.reached for the subscribed targets until ctx ends. It also deletes
// acknowledgements of causes that no longer exist. Several processes may run it.
func (m Monitor) Watch(ctx context.Context, db postgres.Beginner, log *slog.Logger) error {
	tick := time.NewTicker(CheckEvery)
	defer tick.Stop()
	var failures logging.Failures
	for {
		failures.Log(ctx, log, "verdict not checked; the next pass retries", m.Check(ctx, db, CheckEvery))
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// Check is one check of Watch. It does nothing while another process checks, if a process has checked within 80 per
// cent of every, or if no target is subscribed and no cause acknowledged. One transaction records the state and queues
// its event, so each change is announced once.
func (m Monitor) Check(ctx context.Context, db postgres.Beginner, every time.Duration) error {
	var wanted bool
	err := db.QueryRow(ctx, `
		select exists (select from agent_acknowledgements)
		    or exists (select from agent_webhook_targets t
		                where t.enabled
		                  and t.events && array['verdict.changed', 'verdict.*', 'budget.reached', 'budget.*', '*'])`).
		Scan(&wanted)
	if err == nil && wanted {
		err = postgres.InTx(ctx, db, func(tx pgx.Tx) error { return m.check(ctx, tx, every) })
	}
	if err != nil {
		return fmt.Errorf("check the verdict: %w", err)
	}
	return nil
}

// check stores the present verdict and announces its change.
func (m Monitor) check(ctx context.Context, tx pgx.Tx, every time.Duration) error {
	var state string
	var reached map[string]int
	err := tx.QueryRow(ctx, `
		select v.state, v.reached from agent_verdict v
		 where v.checked_at <= clock_timestamp() - @every::interval * 0.8 for update skip locked`,
		postgres.Strict{"every": every}).Scan(&state, &reached)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	} else if err != nil {
		return err
	}
	c, all, err := m.Condition(ctx, tx, nil)
	if err != nil {
		return err
	}
	v := c.Judge(nil, all)
	if v.State != Stopped { // a stopped verdict does not have the other reasons
		_, err = tx.Exec(ctx, `delete from agent_acknowledgements where cause <> all (@causes::text[])`,
			postgres.Strict{"causes": append([]string{}, keysOf(slices.Concat(v.Why, v.Known))...)})
		if err != nil {
			return err
		}
	}
	if v.State != state && (state != "" || v.State != Working) {
		err = emit(ctx, tx, "verdict.changed", map[string]any{
			"state": v.State, "previous": state, "why": v.Why, "known": v.Known,
		})
		if err != nil {
			return err
		}
	}
	reachedNow, err := announceBudgets(ctx, tx, c, reached)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `
		update agent_verdict
		   set since = case when state = @state then since else clock_timestamp() end, state = @state,
		       checked_at = clock_timestamp(), reached = @reached`, postgres.Strict{"state": v.State, "reached": reachedNow})
	return err
}

// announceBudgets queues budget.reached for each limit that has reached 80 or 100 per cent since the last check of the
// day, once with the higher mark. It returns the announced limits.
func announceBudgets(ctx context.Context, tx pgx.Tx, c Condition, previous map[string]int) (map[string]int, error) {
	announced := map[string]int{}
	list := slices.Clone(c.Budgets)
	for _, b := range c.AgentBudgets {
		list = append(list, b)
	}
	for _, b := range list {
		percent := 0
		for _, mark := range []int{80, 100} {
			if b.Limit > 0 && b.Spent*100 >= b.Limit*float64(mark) {
				percent = mark
			}
		}
		key := c.now.UTC().Format(time.DateOnly) + " " + b.Scope + " " + b.Unit
		if percent > previous[key] {
			err := emit(ctx, tx, "budget.reached", map[string]any{
				"scope": b.Scope, "unit": b.Unit, "percent": percent, "spent": b.Spent, "limit": b.Limit,
			})
			if err != nil {
				return nil, err
			}
		}
		if percent = max(percent, previous[key]); percent > 0 {
			announced[key] = percent
		}
	}
	return announced, nil
}

// emit queues an event for the targets, in the transaction.
func emit(ctx context.Context, tx pgx.Tx, event string, data map[string]any) error {
	raw, err := json.Marshal(data)
	if err == nil {
		_, err = tx.Exec(ctx, `select lanekeeper.emit_agent_webhook(@event, '', @data::jsonb)`,
			postgres.Strict{"event": event, "data": string(raw)})
	}
	return err
}
