package api

import (
	"errors"
	"net/http"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/problem"
)

// pairRequest confirms the sender of a channel.
type pairRequest struct {
	Code   string `json:"code"`
	Reason string `json:"reason,omitempty"`
}

// unpairRequest removes a sender's confirmation.
type unpairRequest struct {
	Sender string `json:"sender"`
	Reason string `json:"reason,omitempty"`
}

func (b pairRequest) check() error {
	if b.Code == "" || !isPrintableText(b.Code) {
		return problem.BadBody("code is missing: it is in the sender's first answer")
	}
	return checkReason(b.Reason)
}

func (b unpairRequest) check() error {
	if b.Sender == "" || !isPrintableText(b.Sender) {
		return problem.BadBody("sender is missing: the id that GET /v1/channels/senders lists")
	}
	return checkReason(b.Reason)
}

func (s *server) listChannels(r request) (response, error) {
	list, err := channels.List(r.Context(), s.pool)
	return response{body: pageOf(list, "")}, err
}

// maxSenders bounds the listed senders.
const maxSenders = 500

func (s *server) listPairings(r request) (response, error) {
	list, err := channels.Identities(r.Context(), s.pool, maxSenders)
	return response{body: pageOf(list, "")}, err
}

func (s *server) setChannelEnabled(action string, enabled bool) func(request) (response, error) {
	return func(r request) (response, error) {
		return s.changeNamed(r, action, "channel", channels.ErrNotFound, func(tx pgx.Tx, name, reason string) (bool, error) {
			return channels.Set(r.Context(), tx, name, enabled, actorName(r.Context()), reason)
		})
	}
}

// pairSender confirms the sender with a code.
func (s *server) pairSender(r request) (response, error) {
	body := r.body.(pairRequest)
	input := map[string]any{}
	var paired channels.Identity
	done, err := s.record(r.Context(), "pair_sender", body.Reason, input, func(tx pgx.Tx, _ string) (_ any, err error) {
		paired, err = channels.Pair(r.Context(), tx, body.Code, actorName(r.Context()))
		input["channel"], input["sender"] = paired.Channel, paired.Subject
		return map[string]bool{"changed": err == nil}, err
	})
	if errors.Is(err, channels.ErrCode) {
		return response{}, problem.New(http.StatusConflict, "%s; the sender gets a new one by writing again", err)
	}
	if err != nil {
		return response{}, err
	}
	done.Name, done.Changed = paired.Subject, true
	return response{body: done, trace: done.TraceID}, nil
}

// unpairSender removes a sender's confirmation.
func (s *server) unpairSender(r request) (response, error) {
	body := r.body.(unpairRequest)
	name, err := pathName(r, channels.ErrNotFound)
	if err != nil {
		return response{}, err
	}
	changed := false
	input := map[string]any{"channel": name, "sender": body.Sender}
	done, err := s.record(r.Context(), "unpair_sender", body.Reason, input, func(tx pgx.Tx, _ string) (_ any, err error) {
		changed, err = channels.Unpair(r.Context(), tx, name, body.Sender)
		if err == nil && !changed {
			err = problem.New(http.StatusNotFound, "channel %s has no such sender", name)
		}
		return map[string]bool{"changed": changed}, err
	})
	if err != nil {
		return response{}, err
	}
	done.Name, done.Changed = name, changed
	return response{body: done, trace: done.TraceID}, nil
}

// channelRoutes returns the admin's routes for channels.
func (s *server) channelRoutes() []route {
	return []route{
		{
			method: "GET", path: "/v1/channels", response: page[channels.Channel]{}, handle: s.listChannels,
			about: "Channels by name, with their state, their queues and maybe-sent messages.",
		}, {
			method: "GET", path: "/v1/channels/senders", response: page[channels.Identity]{}, handle: s.listPairings,
			about: "Senders of channels: waiting for an admin, or paired; at most 500.",
		}, {
			method: "POST", path: "/v1/channels/pair", body: pairRequest{}, response: change{}, handle: s.pairSender,
			conflicts: true,
			about:     "Pair a sender by its code; it may then write as a visitor. 409 for an unknown, used or expired code.",
		}, {
			method: "POST", path: "/v1/channels/{id}/unpair", body: unpairRequest{}, response: change{}, handle: s.unpairSender,
			about: "Forget a sender of a channel, by name. The sender then needs a new code.",
		}, {
			method: "POST", path: "/v1/channels/{id}/enable", body: reasonRequest{}, response: change{},
			handle: s.setChannelEnabled("enable_channel", true), about: "Enable a channel by name.",
		}, {
			method: "POST", path: "/v1/channels/{id}/disable", body: reasonRequest{}, response: change{},
			handle: s.setChannelEnabled("disable_channel", false),
			about:  "Disable a channel by name. Nothing is received; messages to it wait.",
		},
	}
}
