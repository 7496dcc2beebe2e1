package executions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// SetVariables replaces the variables of the execution, an object that describes its state to readers. The next durable
// write of the run (a checkpoint, a wait or the completion) stores the variables under its fence, so they need no round
// trip of their own. A StepTx whose row is locked leaves the variables to the next write. SetVariables is not a step: a
// replay calls it again, but the run does not write stored values again. With parallel branches, the last call wins.
func SetVariables(ctx context.Context, variables any) error {
	r, err := runFrom(ctx)
	if err != nil {
		return err
	}
	text, _, err := encode(variables)
	if err == nil {
		text, err = canonicalJSON(text)
	}
	if err != nil {
		return fmt.Errorf("encode variables: %w", err)
	}
	var object map[string]any // also rejects numbers beyond float64, which most readers of the row cannot decode
	if err := json.Unmarshal(text, &object); err != nil || object == nil {
		return fmt.Errorf("set variables: need a JSON object, got %T: %w", variables, errors.Join(err, errNotObject))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.variables = text
	return nil
}

// errNotObject reports variables that are not an object.
var errNotObject = errors.New("pass a struct or a map")

// canonicalJSON returns the same text for JSON values that differ only in the order of their members.
func canonicalJSON(text json.RawMessage) (json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, err
	}
	return json.Marshal(tree)
}

// pendingVariables returns the variables if the row does not have them yet; nil otherwise.
func (r *run) pendingVariables() json.RawMessage {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.variables == nil {
		return nil
	}
	if r.storedVariables == nil && len(r.exec.Variables) > 0 {
		if text, err := canonicalJSON(r.exec.Variables); err == nil {
			r.storedVariables = text
		}
	}
	if bytes.Equal(r.variables, r.storedVariables) {
		return nil
	}
	return r.variables
}

// reserveVariables returns the pending variables for one of several concurrent writes. It returns nil if another write
// has reserved them. The caller calls releaseVariables after its write.
func (r *run) reserveVariables() json.RawMessage {
	text := r.pendingVariables()
	r.mu.Lock()
	defer r.mu.Unlock()
	if text == nil || r.variablesInFlight {
		return nil
	}
	r.variablesInFlight = true
	return text
}

// releaseVariables ends a reservation. err is the result of the write.
func (r *run) releaseVariables(text json.RawMessage, err error) {
	if text == nil {
		return
	}
	r.mu.Lock()
	r.variablesInFlight = false
	r.mu.Unlock()
	if err == nil {
		r.setStoredVariables(text)
	}
}

func (r *run) setStoredVariables(text json.RawMessage) {
	if text == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.storedVariables = text
}

// queueVariables queues the variables in the batch of a fenced write.
func (r *run) queueVariables(b *pgx.Batch, text json.RawMessage) {
	if text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = @id and claim between @claim::bigint and @claim::bigint + 1`, // a wait in this batch increments the claim
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": text})
}

// queueVariablesUnlessLocked is queueVariables for a transaction that may hold lanes. The lock order is executions
// before lanes, so a transaction that locks the row may wait for those lanes. If the row is locked, text becomes nil,
// and the next write stores the variables.
func (r *run) queueVariablesUnlessLocked(b *pgx.Batch, text *json.RawMessage) {
	if *text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = (select x.id from agent_executions x
		              where x.id = @id and x.claim = @claim
		                for no key update skip locked)`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": *text}).Exec(func(tag pgconn.CommandTag) error {
		if tag.RowsAffected() == 0 {
			*text = nil
		}
		return nil
	})
}

// withVariables makes a write with variables. If the database rejects the variables, withVariables logs the error and
// repeats the write without them, because variables must not stop the run.
func (r *run) withVariables(ctx context.Context, text json.RawMessage, write func(text json.RawMessage) error) error {
	err := write(text)
	if text != nil && unstorable(err) {
		if retryErr := write(nil); retryErr == nil {
			r.e.log.ErrorContext(ctx, "variables not stored", "error", err)
			err = nil
		}
	}
	return err
}

// write is Engine.write with the pending variables. It updates the variables first, because the fence of the other
// statements takes a weaker lock on the row.
func (r *run) write(ctx context.Context, queue func(b *pgx.Batch)) error {
	text := r.reserveVariables()
	err := r.withVariables(ctx, text, func(text json.RawMessage) error {
		return r.e.write(ctx, func(b *pgx.Batch) {
			// agent_activity is partitioned, so PostgreSQL would plan its update at each call without this setting. set_config
			// replaces SET LOCAL, which logs a warning in a batch.
			b.Queue(`
				select set_config('lock_timeout', @lock_timeout, true), set_config('plan_cache_mode', 'force_generic_plan', true)`,
				postgres.Strict{"lock_timeout": lockTimeout})
			r.queueVariables(b, text)
			queue(b)
		})
	})
	r.releaseVariables(text, err)
	return err
}
