package operate

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// keyHeader makes a request count once. Who routes requests here refuses one whose first attempt is under way, until the
// process that has it is dead; the turn goes on all the same, so it is an effect of the key as well.
const keyHeader = "Idempotency-Key"

// turnKey is the dedupe key of a request's turn; empty without an Idempotency-Key.
func turnKey(r *http.Request, b Body) string {
	key := r.Header.Get(keyHeader)
	if key == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join([]string{key, b.SessionID, b.Message}, "\n")))
	return "operate " + hex.EncodeToString(sum[:])
}

// unused is the dedupe key under which a request's turn may begin, or the refusal of one that was begun before. After a turn
// that failed, which its client was told, or was of another day, the same request begins another.
func (o *Operate) unused(ctx context.Context, key string) (string, error) {
	for next := key; next != ""; {
		var id string
		var old bool // older than keys are kept: it may be used again
		err := o.Pool.QueryRow(ctx, `
			select id::text, created_at < clock_timestamp() - interval '24 hours' from agent_executions where dedupe_key = @key`,
			postgres.Strict{"key": next}).Scan(&id, &old)
		if errors.Is(err, pgx.ErrNoRows) {
			return next, nil
		}
		if err != nil {
			return "", fmt.Errorf("read turn of an idempotency key: %w", err)
		}
		x, err := executions.Get(ctx, o.Pool, id)
		if err != nil {
			return "", err
		}
		if !old && (!x.Status.Ended() || x.Status == executions.Completed) {
			return "", begunBefore(x)
		}
		next = key + " after " + id
	}
	return "", nil
}

func begunBefore(x executions.Execution) error {
	return problem.New(http.StatusConflict, "an earlier request with this %s began the turn, which is %s: its answer is in thread %s",
		keyHeader, x.Status, deref(x.ThreadID)).Kind("idempotency-key-used", "Already handled").WithTrace(x.TraceID)
}
