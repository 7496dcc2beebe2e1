package executions

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// SetVariables replaces the execution's variables, the state that it shows to others: an object. They are written
// together with the next durable write of the run (a checkpoint, a wait, the end; or the one after, where that is a StepTx while
// somebody has the row locked), under its fence, so they cost no round trip and are lost with that write alone. It is not a step: code that replays sets the same variables again, and what the
// row has already is not written again. Of branches that run at the same time the last one to set them wins.
func SetVariables(ctx context.Context, variables any) error {
	r, err := runOf(ctx)
	if err != nil {
		return err
	}
	text, _, err := encode(variables)
	if err == nil {
		text, err = canonical(text)
	}
	if err != nil {
		return fmt.Errorf("encode variables: %w", err)
	}
	var object map[string]any // a number that has no float64 is beyond what the row can hold, too
	if err := json.Unmarshal(text, &object); err != nil || object == nil {
		return fmt.Errorf("set variables: they are an object that can be stored, not %T: %w", variables, errors.Join(err, errNoObject))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.variables = text
	return nil
}

// errNoObject reports variables that are not an object.
var errNoObject = errors.New("give a struct or a map")

// canonical writes JSON in the one way that two equal values share, whatever the order of their members was.
func canonical(text json.RawMessage) (json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, err
	}
	return json.Marshal(tree)
}

// unwritten returns the variables that the row does not have yet; nil when it has them.
func (r *run) unwritten() json.RawMessage {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.variables == nil {
		return nil
	}
	if r.shown == nil && len(r.exec.Variables) > 0 {
		if text, err := canonical(r.exec.Variables); err == nil {
			r.shown = text
		}
	}
	if bytes.Equal(r.variables, r.shown) {
		return nil
	}
	return r.variables
}

// carry takes the variables for one write of several that may be under way; nil when another has them. The writer calls
// carried when it is done.
func (r *run) carry() json.RawMessage {
	text := r.unwritten()
	r.mu.Lock()
	defer r.mu.Unlock()
	if text == nil || r.carrying {
		return nil
	}
	r.carrying = true
	return text
}

func (r *run) carried(text json.RawMessage, err error) {
	if text == nil {
		return
	}
	r.mu.Lock()
	r.carrying = false
	r.mu.Unlock()
	if err == nil {
		r.haveShown(text)
	}
}

// haveShown notes what the row has.
func (r *run) haveShown(text json.RawMessage) {
	if text == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shown = text
}

// queueVariables queues the variables for the batch of a write that is fenced.
func (r *run) queueVariables(b *pgx.Batch, text json.RawMessage) {
	if text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = @id and claim between @claim::bigint and @claim::bigint + 1`, // a park in this batch has made it one more
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": text})
}

// queueVariablesUnlessLocked is queueVariables for a transaction that may hold lanes, as one that speaks in a thread does: executions are
// locked before lanes, so who has the row now, such as a parent that begins to wait, may want them next. Then text becomes nil, and
// the next write takes the variables along.
func (r *run) queueVariablesUnlessLocked(b *pgx.Batch, text *json.RawMessage) {
	if *text == nil {
		return
	}
	b.Queue(`
		update agent_executions set variables = @variables
		 where id = (select x.id from agent_executions x where x.id = @id and x.claim = @claim for no key update skip locked)`,
		postgres.Strict{"id": r.exec.ID, "claim": r.exec.Claim, "variables": *text}).Exec(func(done pgconn.CommandTag) error {
		if done.RowsAffected() == 0 {
			*text = nil
		}
		return nil
	})
}

// with makes a write that carries variables. Those that the database cannot hold must not keep the run from going on:
// they are left out, and the log says so.
func (r *run) with(ctx context.Context, text json.RawMessage, write func(text json.RawMessage) error) error {
	err := write(text)
	if code := postgres.Code(err); text != nil && (strings.HasPrefix(code, "22") || strings.HasPrefix(code, "54")) {
		if again := write(nil); again == nil {
			r.e.log.ErrorContext(ctx, "variables not stored", "error", err)
			err = nil
		}
	}
	return err
}

// write is the engine's write, which takes along the variables that were set since the last one. They come first, because
// the fence locks the row more weakly than they do.
func (r *run) write(ctx context.Context, queue func(b *pgx.Batch)) error {
	text := r.carry()
	err := r.with(ctx, text, func(text json.RawMessage) error {
		return r.e.write(ctx, func(b *pgx.Batch) {
			queuePatience(b)
			r.queueVariables(b, text)
			queue(b)
		})
	})
	r.carried(text, err)
	return err
}
