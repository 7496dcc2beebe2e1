package api

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// onceMore does what is an effect of its Idempotency-Key, and says what came of it by its id. That may be what the
// key did on another day, as rows live longer than keys: then the key is free again, and do is called with one made
// of both.
func onceMore(ctx context.Context, db postgres.DB, key string, do func(key string) (id string, err error)) error {
	for next := key; ; {
		id, err := do(next)
		if err != nil || key == "" {
			return err
		}
		old, err := beyondKeys(ctx, db, id)
		if err != nil || !old {
			return err
		}
		next = key + " after " + id
	}
}

// beyondKeys reports whether a row is older than keys are kept, by the time in its id, a UUID of version 7. The
// database's clock decides; it is asked only about what is not new by any clock.
func beyondKeys(ctx context.Context, db postgres.DB, id string) (old bool, err error) {
	stamp, _, _ := strings.Cut(strings.Replace(id, "-", "", 1), "-")
	milliseconds, err := strconv.ParseInt(stamp, 16, 64)
	if err != nil {
		return false, fmt.Errorf("read time of id %q: %w", id, err)
	}
	if time.Since(time.UnixMilli(milliseconds)) < keyLife/2 {
		return false, nil
	}
	err = db.QueryRow(ctx, `select @id::uuid < lanekeeper.agent_uuid7_floor(clock_timestamp() - make_interval(secs => @life))`,
		postgres.Strict{"id": id, "life": keyLife.Seconds()}).Scan(&old)
	if err != nil {
		return false, fmt.Errorf("look at the age of %s: %w", id, err)
	}
	return old, nil
}
