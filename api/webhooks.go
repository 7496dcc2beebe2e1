package api

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
	hooks "github.com/lanekeeper/lanekeeper/webhooks"
)

// webhookRoutes returns the routes of deliveries, endpoints and targets. Package surfaces/webhook registers the rest.
func (s *server) webhookRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/webhooks/deliveries", response: page[hooks.Delivery]{}, handle: s.listDeliveries,
			params: listParams(textParam("endpoint", "Name of the endpoint"),
				enumParam("status", "State of the delivery", hooks.Statuses()...)),
			about: "Received webhooks, newest first.",
		}, {
			method: "GET", path: "/v1/webhooks/deliveries/{id}", response: webhook.Shown{}, handle: s.getDelivery,
			about: "One delivery, with its body.",
		}, {
			method: "GET", path: "/v1/webhooks/targets", response: page[hooks.Target]{}, handle: s.listTargets,
			about: "Targets of outgoing webhooks by name, with their pending and dead messages.",
		}, {
			method: "POST", path: "/v1/webhooks/targets/{id}/enable", body: reasonRequest{}, response: change{},
			handle: s.setWebhookEnabled("enable_webhook_target", "target", true, hooks.SetTarget),
			about:  "Enable a target by name and send its pending messages.",
		}, {
			method: "POST", path: "/v1/webhooks/targets/{id}/disable", body: reasonRequest{}, response: change{},
			handle: s.setWebhookEnabled("disable_webhook_target", "target", false, hooks.SetTarget),
			about:  "Disable a target by name. Pending messages wait; new events are not sent.",
		}, {
			method: "POST", path: "/v1/webhooks/endpoints/{id}/enable", body: reasonRequest{}, response: change{},
			handle: s.setWebhookEnabled("enable_webhook", "endpoint", true, hooks.SetEndpoint),
			about:  "Enable an endpoint by name.",
		}, {
			method: "POST", path: "/v1/webhooks/endpoints/{id}/disable", body: reasonRequest{}, response: change{},
			handle: s.setWebhookEnabled("disable_webhook", "endpoint", false, hooks.SetEndpoint),
			about:  "Disable an endpoint by name. Requests to it get 404.",
		}, {
			method: "POST", path: "/v1/webhooks/outbox/{id}/resend", body: reasonRequest{}, response: change{},
			handle:    s.resendWebhook,
			conflicts: true,
			about:     "Give a dead outgoing message one more attempt under the same webhook-id. 409 if it is not dead.",
		},
	}
}

func (s *server) listDeliveries(r request) (response, error) {
	list, err := readPage("deliveries", r.query, func(d hooks.Delivery) string { return d.ID },
		func(before string, limit int) ([]hooks.Delivery, error) {
			return hooks.List(r.Context(), s.pool, hooks.Filter{
				Endpoint: r.query["endpoint"], Status: r.query["status"], Before: before, Limit: limit,
			})
		})
	return response{body: list}, err
}

func (s *server) getDelivery(r request) (response, error) {
	id, err := pathUUID(r, "a delivery")
	if err != nil {
		return response{}, err
	}
	d, err := hooks.Get(r.Context(), s.pool, id)
	if err != nil {
		return response{}, err
	}
	shown, err := webhook.Show(r.Context(), s.pool, d)
	return response{body: shown, trace: d.LastTraceID}, err
}

func (s *server) listTargets(r request) (response, error) {
	targets, err := hooks.Targets(r.Context(), s.pool)
	return response{body: pageOf(targets, "")}, err
}

// setEnabledFunc enables or disables a webhook endpoint or target.
type setEnabledFunc func(
	ctx context.Context, db postgres.DB, name string, enabled bool, by, reason string,
) (bool, error)

func (s *server) setWebhookEnabled(
	action, kind string, enabled bool, set setEnabledFunc,
) func(request) (response, error) {
	return func(r request) (response, error) {
		return s.changeNamed(r, action, kind, hooks.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
			return set(r.Context(), tx, name, enabled, actorName(r.Context()), reason)
		})
	}
}

// resendWebhook gives a dead message one more attempt.
func (s *server) resendWebhook(r request) (response, error) {
	if _, err := pathUUID(r, "an outgoing message"); err != nil {
		return response{}, err
	}
	return s.changeNamed(r, "resend_webhook", "webhook_id", hooks.ErrNotFound,
		func(tx pgx.Tx, id, _ string) (bool, error) {
			resent, err := hooks.Resend(r.Context(), tx, id)
			return requireChanged(resent, err, "message %s is not dead: it was sent or is pending", id)
		})
}
