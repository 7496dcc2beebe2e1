package api

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// keyedRequest is one request with a key: a row of agent_idempotency.
type keyedRequest struct {
	scope, key  string
	fingerprint []byte
	attempt     [16]byte // stored in the row by the claiming attempt
}

// claim claims the key, or returns the first request's state. A repeated call after a broken connection finds its own
// claim.
func (id *keyedRequest) claim(ctx context.Context, db postgres.DB) (*storedResponse, error) {
	for {
		var claimed bool
		err := db.QueryRow(ctx, `
			insert into agent_idempotency as i (scope, key, fingerprint, attempt, lease_until, expires_at)
			select @scope, @key, @fingerprint, @attempt,
			       clock_timestamp() + make_interval(secs => @lease),
			       clock_timestamp() + make_interval(secs => @life)
			  from set_config('lock_timeout', @lock_timeout, true) -- bounds the wait for a concurrent claim
			on conflict (scope, key) do update
			   set fingerprint = excluded.fingerprint,
			       attempt = excluded.attempt,
			       state = 'running',
			       status = 0,
			       header = '{}',
			       body = '',
			       lease_until = excluded.lease_until,
			       expires_at = excluded.expires_at
			 where i.expires_at <= clock_timestamp()
			    or i.attempt = excluded.attempt -- the claim of this attempt, whose reply was lost
			    or (i.state = 'running'         -- the same request, whose process died
			        and i.lease_until <= clock_timestamp()
			        and i.fingerprint = excluded.fingerprint)
			returning true`, postgres.Strict{
			"scope": id.scope, "key": id.key, "fingerprint": id.fingerprint, "attempt": id.attempt,
			"lease": keyLease.Seconds(), "life": keyTTL.Seconds(), "lock_timeout": postgres.LockTimeout,
		}).Scan(&claimed)
		if err == nil {
			return nil, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, fmt.Errorf("claim idempotency key: %w", err)
		}
		prior, err := id.read(ctx, db)
		if !errors.Is(err, pgx.ErrNoRows) { // another attempt released the key meanwhile: retry
			return prior, err
		}
	}
}

// DeleteExpiredKeys deletes the idempotency keys past their time, with the stored responses. Housekeeping calls it.
func DeleteExpiredKeys(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `
		delete from agent_idempotency
		 where (scope, key) in (
		         select scope, key from agent_idempotency where expires_at <= statement_timestamp() for update skip locked)`)
	if err != nil {
		return fmt.Errorf("delete expired idempotency keys: %w", err)
	}
	return nil
}

// storedResponse is the state of the first request with a key.
type storedResponse struct {
	Same   bool
	State  string
	Status int
	Header json.RawMessage
	Body   []byte
}

func (k *storedResponse) header() map[string]string {
	var h map[string]string
	if json.Unmarshal(k.Header, &h) != nil {
		return nil // only keyedRequest.complete writes it
	}
	return h
}

// read returns the state of the request that holds the key.
func (id *keyedRequest) read(ctx context.Context, db postgres.DB) (*storedResponse, error) {
	rows, err := db.Query(ctx, `
		select fingerprint = @fingerprint as same, state, status, header, body
		  from agent_idempotency
		 where scope = @scope
		   and key = @key`,
		postgres.Strict{"fingerprint": id.fingerprint, "scope": id.scope, "key": id.key})
	return postgres.CollectOne(rows, err, pgx.ErrNoRows, "read idempotency key",
		pgx.RowToAddrOfStructByName[storedResponse])
}

func (id *keyedRequest) renew(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `
		update agent_idempotency
		   set lease_until = clock_timestamp() + make_interval(secs => @lease)
		 where scope = @scope
		   and key = @key
		   and attempt = @attempt
		   and state = 'running'`,
		postgres.Strict{"lease": keyLease.Seconds(), "scope": id.scope, "key": id.key, "attempt": id.attempt})
	return err
}

// outcome is the response to store, or the release of the key if state is empty.
type outcome struct {
	state  string
	status int
	header map[string]string
	body   []byte
}

// complete stores the response or releases the key. An attempt that lost its lease changes nothing.
func (id *keyedRequest) complete(ctx context.Context, db postgres.DB, out outcome) error {
	if out.state == "" {
		_, err := db.Exec(ctx, `
			delete from agent_idempotency
			 where scope = @scope
			   and key = @key
			   and attempt = @attempt
			   and state = 'running'`,
			postgres.Strict{"scope": id.scope, "key": id.key, "attempt": id.attempt})
		return err
	}
	_, err := db.Exec(ctx, `
		update agent_idempotency
		   set state = @state, status = @status, header = @header, body = @body
		 where scope = @scope
		   and key = @key
		   and attempt = @attempt
		   and state = 'running'`, postgres.Strict{
		"state": out.state, "status": out.status, "header": out.header, "body": out.body,
		"scope": id.scope, "key": id.key, "attempt": id.attempt,
	})
	return err
}
