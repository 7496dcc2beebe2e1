package api

import (
	"context"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	hooks "github.com/lanekeeper/lanekeeper/webhooks"
)

// switching takes an endpoint or a target of webhooks in or out of service.
type switching func(ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string) (bool, error)

func (s *server) listTargets(r request) (answer, error) {
	got, err := hooks.Targets(r.Context(), s.pool)
	return answer{body: pageOf(got, "")}, err
}

// switchWebhook is a lever on an endpoint or a target.
func (s *server) switchWebhook(action, thing string, enabled bool, set switching) func(request) (answer, error) {
	return func(r request) (answer, error) {
		return s.pull(r, action, thing, hooks.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
			return set(r.Context(), tx, name, enabled, admin, reason)
		})
	}
}

// resendWebhook gives a message that was given up one more attempt.
func (s *server) resendWebhook(r request) (answer, error) {
	if _, err := uuidIn(r, "an outgoing message"); err != nil {
		return answer{}, err
	}
	return s.pull(r, "resend_webhook", "webhook_id", hooks.ErrNotFound, func(tx pgx.Tx, id, _ string) (bool, error) {
		again, err := hooks.Resend(r.Context(), tx, id)
		if err == nil && !again {
			err = problem.New(http.StatusConflict, "message %s was not given up: it was sent, or is still to be", id)
		}
		return again, err
	})
}

// hooking is what an admin does about webhooks, beside the routes of the surface that receives them.
func (s *server) hooking() []route {
	return []route{
		{
			method: "GET", path: "/v1/webhooks/targets", answer: page[hooks.Target]{}, handle: s.listTargets,
			about: "Who is told of the agent's events, by name, with how many messages wait for each and how many were given up.",
		}, {
			method: "POST", path: "/v1/webhooks/targets/{id}/enable", body: because{}, answer: change{},
			handle: s.switchWebhook("enable_webhook_target", "target", true, hooks.SetTarget),
			about:  "Put a target back into service, by its name. What waited for it is sent.",
		}, {
			method: "POST", path: "/v1/webhooks/targets/{id}/disable", body: because{}, answer: change{},
			handle: s.switchWebhook("disable_webhook_target", "target", false, hooks.SetTarget),
			about:  "Take a target out of service, by its name. What is to be sent waits; of new events it is not told.",
		}, {
			method: "POST", path: "/v1/webhooks/endpoints/{id}/enable", body: because{}, answer: change{},
			handle: s.switchWebhook("enable_webhook", "endpoint", true, hooks.SetEndpoint),
			about:  "Put an endpoint back into service, by its name.",
		}, {
			method: "POST", path: "/v1/webhooks/endpoints/{id}/disable", body: because{}, answer: change{},
			handle: s.switchWebhook("disable_webhook", "endpoint", false, hooks.SetEndpoint),
			about:  "Take an endpoint out of service, by its name: what is posted to it is answered with 404.",
		}, {
			method: "POST", path: "/v1/webhooks/outbox/{id}/resend", body: because{}, answer: change{}, handle: s.resendWebhook,
			conflicts: true,
			about:     "Give an outgoing message that was given up one more attempt, under the same webhook-id. 409 when it was not given up.",
		},
	}
}
