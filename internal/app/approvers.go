package app

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/principals"
)

// approvers finds the principals of accounts that press buttons in channels. Only linked accounts have one: pairing
// makes none.
type approvers struct{ pool *pgxpool.Pool }

// Approver implements [channels.Principals].
func (a approvers) Approver(
	ctx context.Context, issuer, subject, via, message string,
) (context.Context, string, error) {
	p, err := principals.ByIdentity(ctx, a.pool, issuer, subject)
	switch {
	case errors.Is(err, principals.ErrNotFound):
		return nil, "", channels.ErrNotLinked
	case err != nil:
		return nil, "", err
	case !p.Role.May(principals.ApprovalsDecide):
		return nil, "", channels.ErrMayNot
	}
	return actingFor(ctx, p, via, message), p.Name, nil
}

// Asking implements [channels.Principals].
func (a approvers) Asking(ctx context.Context, issuer, subject, via, message string) (context.Context, error) {
	p, err := principals.ByIdentity(ctx, a.pool, issuer, subject)
	if errors.Is(err, principals.ErrNotFound) {
		return ctx, nil
	}
	if err != nil {
		return nil, err
	}
	return actingFor(ctx, p, via, message), nil
}

func actingFor(ctx context.Context, p principals.Principal, via, message string) context.Context {
	return activity.WithActor(ctx, activity.Actor{Name: p.Name, Via: via, Message: message})
}
