package app

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/principals"
)

// approvers finds the principals of accounts that press buttons in channels. Only linked accounts have one: pairing
// makes none.
type approvers struct{ pool *pgxpool.Pool }

// Approver implements [channels.Principals].
func (a approvers) Approver(ctx context.Context, issuer, subject, via string) (context.Context, string, error) {
	p, err := principals.ByIdentity(ctx, a.pool, issuer, subject)
	switch {
	case errors.Is(err, principals.ErrNotFound):
		return nil, "", channels.ErrNotLinked
	case err != nil:
		return nil, "", err
	case !p.Role.May(principals.ApprovalsDecide):
		return nil, "", channels.ErrMayNot
	}
	caller := &principals.Caller{Principal: p, Scopes: []string{string(principals.ApprovalsDecide)}}
	return principals.WithCaller(ctx, caller, via), p.Name, nil
}
