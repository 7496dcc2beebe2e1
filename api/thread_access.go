package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

// accessRoutes returns the routes that manage access to threads.
func (s *server) accessRoutes() []route {
	return []route{
		{
			method: "POST", path: "/v1/threads/{id}/join_tokens", body: joinTokenRequest{}, response: threads.Token{},
			status: http.StatusCreated, handle: s.createJoinToken,
			secret: "find the token with GET /v1/threads/{id}/access, revoke it, and create another one under a new key",
			about: "Create a join token: a visitor joins the conversation by sending it as X-Thread-Join. It is " +
				"valid for one visitor, or reusable until it expires, and is shown once.",
		}, {
			method: "POST", path: "/v1/threads/{id}/participants", body: accessRequest{}, response: accessResponse{},
			status: http.StatusCreated, handle: s.grantAccess, safeToRetry: true, acceptsKey: true,
			conflicts: true,
			about: "Open a conversation to a chat key, a flow or a webhook endpoint. 409 if the participant has another one " +
				"of that name.",
		}, {
			method: "GET", path: "/v1/threads/{id}/access", response: page[threads.Access]{}, handle: s.listAccess,
			about: "Access grants and join tokens of a conversation, without the secrets.",
		}, {
			method: "DELETE", path: "/v1/threads/{id}/access/{access_id}", response: change{}, handle: s.revokeAccess,
			about: "Revoke an access. Revoking a join token also ends the access of its visitors.",
		},
	}
}

type joinTokenRequest struct {
	Reusable    bool            `json:"reusable,omitempty" doc:"any number of visitors may join with it, not only one"`
	ExpiresIn   json.RawMessage `json:"expires_in,omitempty" doc:"seconds, or text such as 24h or 7d; default 24h"`
	ExecutionID string          `json:"execution_id,omitempty" doc:"expires with this execution"`
}

func (i joinTokenRequest) check() error {
	if i.ExecutionID != "" && !uuidForm.MatchString(i.ExecutionID) {
		return problem.BadBody("execution_id is %.60q; use the id of an execution", i.ExecutionID)
	}
	life, err := readDuration("expires_in", i.ExpiresIn)
	if err == nil && life > threads.MaxTokenLife {
		err = problem.BadBody("expires_in is at most 30 days")
	}
	return err
}

func (s *server) createJoinToken(r request) (response, error) {
	b := r.body.(joinTokenRequest)
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	life, err := readDuration("expires_in", b.ExpiresIn)
	if err == nil && b.ExecutionID != "" {
		err = s.checkLive(r.Context(), b.ExecutionID)
	}
	if err != nil {
		return response{}, err
	}
	var token threads.Token
	c, err := s.record(r.Context(), "invite_into_thread", "a join token was given out", map[string]any{"thread_id": id},
		func(tx pgx.Tx, _ string) (any, error) {
			token, err = threads.Invite(r.Context(), tx, threads.Invitation{
				ThreadID: id, Reusable: b.Reusable, Life: life, ExecutionID: b.ExecutionID, By: actorName(r.Context()),
			})
			return map[string]any{"access_id": token.ID, "expires_at": token.ExpiresAt.UTC().Format(time.RFC3339)}, err
		})
	return response{body: token, status: http.StatusCreated, trace: c.TraceID}, threadError(err)
}

// checkLive rejects an ended execution, because its join token would admit nobody.
func (s *server) checkLive(ctx context.Context, execution string) error {
	x, err := executions.Get(ctx, s.pool, execution)
	switch {
	case errors.Is(err, executions.ErrNotFound):
		return problem.New(http.StatusNotFound, "execution_id: no execution %s", execution)
	case err == nil && x.Status.Ended():
		err = problem.BadBody("execution_id: execution %s has ended: %s", execution, x.Status)
	}
	return err
}

// accessRequest names a participant by exactly one of Key, Flow and Webhook.
type accessRequest struct {
	Key     string `json:"key,omitempty" doc:"name of a chat key"`
	Flow    string `json:"flow,omitempty"`
	Webhook string `json:"webhook,omitempty" doc:"an endpoint"`
	Name    string `json:"name,omitempty" doc:"the thread's name for the key or endpoint; default its id"`
}

func (b accessRequest) principal() threads.Principal {
	switch {
	case b.Key != "":
		return threads.Key(b.Key)
	case b.Flow != "":
		return threads.Principal{Kind: threads.ByFlow, Owner: b.Flow}
	}
	return threads.Principal{Kind: threads.ByWebhook, Owner: b.Webhook}
}

func (b accessRequest) check() error {
	named := 0
	for _, name := range []string{b.Key, b.Flow, b.Webhook} {
		if name != "" {
			named++
		}
		if !isPrintableText(name) || len(name) > 200 {
			return problem.BadBody("key, flow and webhook have at most 200 bytes of text")
		}
	}
	switch {
	case named != 1:
		return problem.BadBody("name one of key, flow and webhook")
	case b.Flow != "" && b.Name != "":
		return problem.BadBody("name belongs to key and webhook; a flow uses the thread's id")
	case b.Name != "" && threads.CheckID(b.Name) != nil:
		return problem.BadBody("name: %s", threads.ErrInvalid)
	}
	return nil
}

type accessResponse struct {
	ID       string `json:"id"`
	ThreadID string `json:"thread_id"`
	Name     string `json:"name" doc:"the thread's name for the participant"`
}

func (s *server) grantAccess(r request) (response, error) {
	b := r.body.(accessRequest)
	id, err := pathThread(r)
	if err == nil {
		err = s.auth.checkChatKey(b.Key)
	}
	if err != nil {
		return response{}, err
	}
	to := b.principal()
	granted := accessResponse{ThreadID: id, Name: cmp.Or(b.Name, id)}
	c, err := s.record(r.Context(), "open_thread", "a thread was opened to "+string(to.Kind)+" "+to.Owner,
		map[string]any{"thread_id": id, string(to.Kind): to.Owner},
		func(tx pgx.Tx, _ string) (any, error) {
			granted.ID, err = threads.Grant(r.Context(), tx, id, to, granted.Name, actorName(r.Context()))
			return map[string]any{"access_id": granted.ID}, err
		})
	if errors.Is(err, threads.ErrTaken) {
		return response{}, problem.New(http.StatusConflict, "%s %s has another thread %q; give this one another name",
			to.Kind, to.Owner, granted.Name)
	}
	return response{body: granted, status: http.StatusCreated, trace: c.TraceID}, threadError(err)
}

func (s *server) listAccess(r request) (response, error) {
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	if _, err := threads.Get(r.Context(), s.pool, id); err != nil {
		return response{}, threadError(err)
	}
	list, err := threads.AccessOf(r.Context(), s.pool, id)
	return response{body: pageOf(list, "")}, err
}

func (s *server) revokeAccess(r request) (response, error) {
	id, err := pathThread(r)
	if err != nil {
		return response{}, err
	}
	access := r.PathValue("access_id")
	if !uuidForm.MatchString(access) {
		return response{}, problem.New(http.StatusBadRequest, "malformed access id").Kind("malformed-id", "Malformed id")
	}
	c, err := s.record(r.Context(), "revoke_thread_access", "an access to a thread was revoked",
		map[string]any{"thread_id": id, "access_id": access},
		func(tx pgx.Tx, _ string) (any, error) {
			return map[string]any{"revoked": true}, threads.Revoke(r.Context(), tx, id, access)
		})
	c.Name, c.Changed = access, err == nil
	return response{body: c, trace: c.TraceID}, threadError(err)
}
