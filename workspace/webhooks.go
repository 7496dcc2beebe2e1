package workspace

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/webhooks"
)

// webhookEndpoints is the kind webhook. Whether one is in service is the admin's.
func webhookEndpoints(w Workspace) matcher {
	return table[webhooks.EndpointDefinition, webhooks.Endpoint]{
		kind: "webhook", documents: w.Webhooks, name: func(d webhooks.EndpointDefinition) string { return d.Name },
		get: func(ctx context.Context, tx pgx.Tx, name string) (webhooks.Endpoint, error) {
			return webhooks.GetEndpoint(ctx, tx, name)
		},
		put: func(ctx context.Context, tx pgx.Tx, d webhooks.EndpointDefinition) (bool, error) {
			return webhooks.PutEndpoint(ctx, tx, d, Source)
		},
		notFound: webhooks.ErrNotFound, remove: webhooks.RemoveEndpoints,
		declared: []string{"description", "scheme", "secrets", "settings", "actions", "source"},
	}
}

// webhookTargets is the kind webhook_target. Whether one is in service, and how it fares, is not a file's.
func webhookTargets(w Workspace) matcher {
	return table[webhooks.TargetDefinition, webhooks.Target]{
		kind: "webhook_target", documents: w.Targets, name: func(d webhooks.TargetDefinition) string { return d.Name },
		get: func(ctx context.Context, tx pgx.Tx, name string) (webhooks.Target, error) {
			return webhooks.GetTarget(ctx, tx, name)
		},
		put: func(ctx context.Context, tx pgx.Tx, d webhooks.TargetDefinition) (bool, error) {
			return webhooks.PutTarget(ctx, tx, d, Source)
		},
		notFound: webhooks.ErrNotFound, remove: webhooks.RemoveTargets,
		declared: []string{"description", "url", "secrets", "events", "max_failures", "source"},
	}
}
