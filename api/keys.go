package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// identity is one request with a key: a row of agent_idempotency.
type identity struct {
	scope, key  string
	fingerprint []byte
	attempt     [16]byte // the id of this attempt, which the row has when the request is ours to handle
}

// claim takes the key for this request, or tells what is known of the first one. It also forgets some of
// the keys whose day is over. Called again when its connection broke, it finds what it took the first time.
func (id *identity) claim(ctx context.Context, db postgres.DB) (*kept, error) {
	for {
		var ours bool
		err := db.QueryRow(ctx, `
			with forgotten as (
			  delete from agent_idempotency
			   where (scope, key) in (select o.scope, o.key from agent_idempotency o
			          where o.expires_at <= clock_timestamp() and (o.scope, o.key) <> (@scope, @key)
			          order by o.expires_at limit 20 for update skip locked))
			insert into agent_idempotency as i (scope, key, fingerprint, attempt, lease_until, expires_at)
			select @scope, @key, @fingerprint, @attempt, clock_timestamp() + make_interval(secs => @lease), clock_timestamp() + make_interval(secs => @life)
			  from set_config('lock_timeout', @patience, true)
			on conflict (scope, key) do update
			   set fingerprint = excluded.fingerprint, attempt = excluded.attempt, state = 'running', status = 0, header = '{}',
			       body = '', lease_until = excluded.lease_until, expires_at = excluded.expires_at
			 where i.expires_at <= clock_timestamp() or i.attempt = excluded.attempt
			    or (i.state = 'running' and i.lease_until <= clock_timestamp() and i.fingerprint = excluded.fingerprint)
			returning true`, postgres.Strict{
			"scope": id.scope, "key": id.key, "fingerprint": id.fingerprint, "attempt": id.attempt, "lease": keyLease.Seconds(), "life": keyLife.Seconds(),
			"patience": postgres.LockTimeout,
		}).Scan(&ours)
		if err == nil {
			return nil, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, fmt.Errorf("claim idempotency key: %w", err)
		}
		first, err := id.first(ctx, db)
		if !errors.Is(err, pgx.ErrNoRows) { // else it was given up in between
			return first, err
		}
	}
}

// first reads what is known of the request that has the key.
func (id *identity) first(ctx context.Context, db postgres.DB) (*kept, error) {
	rows, err := db.Query(ctx, `
		select fingerprint = @fingerprint as same, state, status, header, body
		  from agent_idempotency where scope = @scope and key = @key`,
		postgres.Strict{"fingerprint": id.fingerprint, "scope": id.scope, "key": id.key})
	if err != nil {
		return nil, fmt.Errorf("read idempotency key: %w", err)
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[kept])
	if err != nil {
		return nil, fmt.Errorf("read idempotency key: %w", err)
	}
	return got, nil
}

func (id *identity) renew(ctx context.Context, db postgres.DB) error {
	_, err := db.Exec(ctx, `
		update agent_idempotency set lease_until = clock_timestamp() + make_interval(secs => @lease)
		 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`,
		postgres.Strict{"lease": keyLease.Seconds(), "scope": id.scope, "key": id.key, "attempt": id.attempt})
	return err
}

// settlement is what becomes of a key: the answer that is kept under it, or nothing when state is empty.
type settlement struct {
	state  string
	status int
	header map[string]string
	body   []byte
}

// settlementOf gives the key up when the answer does not settle the request.
func settlementOf(held *holding, whole bool) settlement {
	switch {
	case !whole && !held.through, !final(held.code()):
		return settlement{}
	case held.through:
		return settlement{"unkept", held.code(), held.headers(), held.kept()}
	}
	return settlement{"answered", held.code(), held.headers(), held.kept()}
}

// settle keeps the answer, or gives the key up. An attempt whose lease was lost to another changes nothing.
func (id *identity) settle(ctx context.Context, db postgres.DB, as settlement) error {
	if as.state == "" {
		_, err := db.Exec(ctx, `
			delete from agent_idempotency
			 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`,
			postgres.Strict{"scope": id.scope, "key": id.key, "attempt": id.attempt})
		return err
	}
	_, err := db.Exec(ctx, `
		update agent_idempotency set state = @state, status = @status, header = @header, body = @body
		 where scope = @scope and key = @key and attempt = @attempt and state = 'running'`, postgres.Strict{
		"state": as.state, "status": as.status, "header": as.header, "body": as.body,
		"scope": id.scope, "key": id.key, "attempt": id.attempt,
	})
	return err
}

// final reports an answer that would be the same the next time.
func final(status int) bool {
	switch status {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooEarly, http.StatusTooManyRequests:
		return false
	}
	return status < http.StatusInternalServerError
}
