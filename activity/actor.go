package activity

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Admin is the actor of local commands, and the default of [ActorFrom].
const Admin = "admin"

// Actor is the principal behind a request or command, as the audit names it.
type Actor struct {
	Name      string // of the principal
	TokenID   string // of the API token; empty for a session and for AGENT_ADMIN_TOKEN
	Via       string // http, page, cli, slack, telegram, …
	MessageID string // id, at the provider, of the message whose button was pressed
}

type actorKey struct{}

// WithActor returns a context with the actor. The zero Actor removes an earlier one.
func WithActor(ctx context.Context, a Actor) context.Context {
	return context.WithValue(ctx, actorKey{}, a)
}

// lookupActor returns the actor of ctx. ok is false without one.
func lookupActor(ctx context.Context) (a Actor, ok bool) {
	a, _ = ctx.Value(actorKey{}).(Actor)
	return a, a.Name != ""
}

// ActorFrom returns the actor of ctx, or [Admin] if ctx has none, as in a run.
func ActorFrom(ctx context.Context) Actor {
	if a, ok := lookupActor(ctx); ok {
		return a
	}
	return Actor{Name: Admin}
}

// HasActor reports whether ctx names an actor.
func HasActor(ctx context.Context) bool {
	_, ok := lookupActor(ctx)
	return ok
}

// WithActorFields returns a copy of the input of a row, with the actor of ctx: by, key_id (of the token), via, and the
// message of the channel. Existing keys take precedence. Without an actor it returns input itself.
func WithActorFields(ctx context.Context, input map[string]any) map[string]any {
	a, ok := lookupActor(ctx)
	if !ok {
		return input
	}
	fields := map[string]any{"by": a.Name}
	if a.TokenID != "" {
		fields["key_id"] = a.TokenID
	}
	if a.Via != "" {
		fields["via"] = a.Via
	}
	if a.MessageID != "" {
		fields["message"] = a.MessageID
	}
	maps.Copy(fields, input)
	return fields
}

// SetActor sets the actor of ctx for SQL functions in the transaction tx. They add the fields of [WithActorFields] to
// their rows.
func SetActor(ctx context.Context, tx pgx.Tx) error {
	b := &pgx.Batch{}
	QueueActor(ctx, b)
	if err := tx.SendBatch(ctx, b).Close(); err != nil {
		return fmt.Errorf("set actor: %w", err)
	}
	return nil
}

// QueueActor queues [SetActor]. It applies to the later statements of b, because a batch is one transaction.
func QueueActor(ctx context.Context, b *pgx.Batch) {
	actor, err := json.Marshal(WithActorFields(ctx, map[string]any{}))
	if err != nil { // strings cannot fail
		panic(err)
	}
	b.Queue(`select set_config('lanekeeper.actor', @actor, true)`, postgres.Strict{"actor": string(actor)})
}

// RecordRequester records the actor of ctx as a requester of effect, a reference such as "execution ID". Approvals with
// four eyes refuse that actor. Without an actor it does nothing.
func RecordRequester(ctx context.Context, db postgres.DB, effect string) error {
	a, ok := lookupActor(ctx)
	if !ok {
		return nil
	}
	_, err := db.Exec(ctx, `
		insert into agent_links (cause, kind, effect) values ('principal ' || @name, 'asked', @effect)
		on conflict do nothing`,
		postgres.Strict{"name": a.Name, "effect": effect})
	if err != nil {
		return fmt.Errorf("record who asked: %w", err)
	}
	return nil
}
