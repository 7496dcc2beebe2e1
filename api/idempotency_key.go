package api

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// derivedKey derives the database key of a request from its Idempotency-Key, its caller, and the parts that name its
// effect; "" without an Idempotency-Key. Under that key the effect happens once, even if the process dies before it
// stores the response.
func derivedKey(r *http.Request, parts ...string) string {
	key := r.Header.Get(keyHeader)
	if key == "" {
		return ""
	}
	sum := sha256.Sum256([]byte(strings.Join(append([]string{callerOf(r.Context()), key}, parts...), "\n")))
	return "request " + hex.EncodeToString(sum[:])
}

// withFreshKey runs do under a derived key. do returns the id of the row that has the key. Rows outlive keys. If the
// row is older than the lifetime of an Idempotency-Key, withFreshKey repeats do with a key derived from the old key and
// the id.
func withFreshKey(ctx context.Context, db postgres.DB, key string, do func(key string) (id string, err error)) error {
	for next := key; ; {
		id, err := do(next)
		if err != nil || key == "" {
			return err
		}
		old, err := keyExpired(ctx, db, id)
		if err != nil || !old {
			return err
		}
		next = key + " after " + id
	}
}

// keyExpired reports whether a row is older than a key's lifetime, by the time in its UUIDv7 and the database's clock.
// For a row that is new by this process's clock, it does not query the database.
func keyExpired(ctx context.Context, db postgres.DB, id string) (old bool, err error) {
	hexTime, _, _ := strings.Cut(strings.Replace(id, "-", "", 1), "-")
	milliseconds, err := strconv.ParseInt(hexTime, 16, 64)
	if err != nil {
		return false, fmt.Errorf("read time of id %q: %w", id, err)
	}
	if time.Since(time.UnixMilli(milliseconds)) < keyTTL/2 {
		return false, nil
	}
	err = db.QueryRow(ctx,
		`select @id::uuid < lanekeeper.agent_uuid7_floor(clock_timestamp() - make_interval(secs => @life))`,
		postgres.Strict{"id": id, "life": keyTTL.Seconds()}).Scan(&old)
	if err != nil {
		return false, fmt.Errorf("read the age of %s: %w", id, err)
	}
	return old, nil
}
