package activity

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Admin is the actor of a person on the command line, over the HTTP API or in the Engine Room.
const Admin = "admin"

// Actor is the principal behind a request or command, as the audit names it.
type Actor struct {
	Name    string // of the principal
	TokenID string // of the API token; empty for a session and for AGENT_ADMIN_TOKEN
	Via     string // http, page, cli, slack, telegram, …
	Message string // the provider's id of the message with the button
}

type actorKey struct{}

// WithActor returns a context whose acts and decisions name their principal.
func WithActor(ctx context.Context, a Actor) context.Context {
	return context.WithValue(ctx, actorKey{}, a)
}

// ActorFrom returns the actor of ctx; without one it is [Admin].
func ActorFrom(ctx context.Context) Actor {
	if a, ok := ctx.Value(actorKey{}).(Actor); ok && a.Name != "" {
		return a
	}
	return Actor{Name: Admin}
}

// SetActor sets the actor for SQL functions in the transaction. They add the same fields as [Describe] to their rows.
func SetActor(ctx context.Context, tx postgres.DB) error {
	b := &pgx.Batch{}
	QueueActor(ctx, b)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("set actor: %w", err)
	}
	return nil
}

// QueueActor is [SetActor] for the statements after it in a batch, which is one transaction.
func QueueActor(ctx context.Context, b *pgx.Batch) {
	actor, err := json.Marshal(Describe(ctx, map[string]any{}))
	if err != nil { // strings cannot fail
		panic(err)
	}
	b.Queue(`select set_config('lanekeeper.actor', @actor, true)`, postgres.Strict{"actor": string(actor)})
}

// HasActor reports whether ctx names an actor.
func HasActor(ctx context.Context) bool {
	a, ok := ctx.Value(actorKey{}).(Actor)
	return ok && a.Name != ""
}

// RecordRequester records that the actor of ctx asked for an execution or a run. Approvals with four eyes refuse that
// actor. effect is a reference such as "execution ID". Without an actor it does nothing.
func RecordRequester(ctx context.Context, db postgres.DB, effect string) error {
	if !HasActor(ctx) {
		return nil
	}
	_, err := db.Exec(ctx, `
		insert into agent_links (cause, kind, effect) values ('principal ' || @name, 'asked', @effect)
		on conflict do nothing`,
		postgres.Strict{"name": ActorFrom(ctx).Name, "effect": effect})
	if err != nil {
		return fmt.Errorf("record who asked: %w", err)
	}
	return nil
}

// Describe returns the input of a row with the actor of ctx: by, key_id (of the token), via, and the message of the
// channel. input has precedence.
func Describe(ctx context.Context, input map[string]any) map[string]any {
	a, ok := ctx.Value(actorKey{}).(Actor)
	if !ok || a.Name == "" {
		return input
	}
	described := map[string]any{"by": a.Name}
	if a.TokenID != "" {
		described["key_id"] = a.TokenID
	}
	if a.Via != "" {
		described["via"] = a.Via
	}
	if a.Message != "" {
		described["message"] = a.Message
	}
	maps.Copy(described, input)
	return described
}
