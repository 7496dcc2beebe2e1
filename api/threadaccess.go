package api

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/threads"
)

// inviting asks for a join token.
type inviting struct {
	Reusable    bool            `json:"reusable,omitempty"`     // lets any number of visitors in until its end; else one
	ExpiresIn   json.RawMessage `json:"expires_in,omitempty"`   // seconds, or text such as 24h or 7d; 24h when left out
	ExecutionID string          `json:"execution_id,omitempty"` // the token ends with this execution
}

func (i inviting) check() error {
	if i.ExecutionID != "" && !uuidForm.MatchString(i.ExecutionID) {
		return badBody("execution_id is %.60q; it has to be the id of an execution", i.ExecutionID)
	}
	life, err := timeout(i.ExpiresIn)
	switch {
	case err != nil:
		return badBody("expires_in has to be more than 0: a number of seconds, or text such as 90m, 24h or 7d")
	case life > threads.MaxTokenLife:
		return badBody("expires_in is at most 30 days")
	}
	return nil
}

// letting names who may read and speak in a thread.
type letting struct {
	Key     string `json:"key,omitempty"` // name of a chat key
	Flow    string `json:"flow,omitempty"`
	Webhook string `json:"webhook,omitempty"` // an endpoint
	Name    string `json:"name,omitempty"`    // what the key or the endpoint calls the thread; its id when left out
}

func (l letting) principal() threads.Principal {
	switch {
	case l.Key != "":
		return threads.Key(l.Key)
	case l.Flow != "":
		return threads.Principal{Kind: threads.ByFlow, Owner: l.Flow}
	}
	return threads.Principal{Kind: threads.ByWebhook, Owner: l.Webhook}
}

func (l letting) check() error {
	named := 0
	for _, name := range []string{l.Key, l.Flow, l.Webhook} {
		if name != "" {
			named++
		}
		if !storable(name) || len(name) > 200 {
			return badBody("key, flow and webhook have at most 200 bytes of text")
		}
	}
	switch {
	case named != 1:
		return badBody("name one of key, flow and webhook")
	case l.Flow != "" && l.Name != "":
		return badBody("name belongs to key and webhook; a flow calls the thread by its id")
	case l.Name != "" && threads.CheckID(l.Name) != nil:
		return badBody("name: %s", threads.ErrInvalid)
	}
	return nil
}

// threadIn is the thread that the path names.
func threadIn(r request) (string, error) {
	id := r.PathValue("id")
	if err := threads.CheckID(id); err != nil {
		return "", problem.New(http.StatusBadRequest, "%s", err).Kind("malformed-id", "Malformed id")
	}
	return id, nil
}

// noThread tells of a thread, or an access, that there is not.
func noThread(err error) error {
	if errors.Is(err, threads.ErrNoAccess) {
		return problem.New(http.StatusNotFound, "%s", threads.ErrNoAccess)
	}
	if errors.Is(err, threads.ErrNotFound) {
		return problem.New(http.StatusNotFound, "%s", threads.ErrNotFound)
	}
	return err
}

func (s *server) inviteIntoThread(r request) (answer, error) {
	b := r.body.(inviting)
	id, err := threadIn(r)
	if err != nil {
		return answer{}, err
	}
	life, err := timeout(b.ExpiresIn)
	if err != nil {
		return answer{}, err
	}
	var token threads.Token
	c, err := s.audited(r.Context(), "invite_into_thread", "a join token was given out", map[string]any{"thread_id": id},
		func(tx pgx.Tx, _ string) (any, error) {
			token, err = threads.Invite(r.Context(), tx, threads.Invitation{
				ThreadID: id, Reusable: b.Reusable, Life: life, ExecutionID: b.ExecutionID, By: admin,
			})
			return map[string]any{"access_id": token.ID, "expires_at": token.ExpiresAt.UTC().Format(time.RFC3339)}, err
		})
	return answer{body: token, status: http.StatusCreated, trace: c.TraceID}, noThread(err)
}

// letIn is an access that was given.
type letIn struct {
	ID       string `json:"id"`
	ThreadID string `json:"thread_id"`
	Name     string `json:"name"` // what the participant calls the thread
}

func (s *server) letIntoThread(r request) (answer, error) {
	b := r.body.(letting)
	id, err := threadIn(r)
	if err != nil {
		return answer{}, err
	}
	to := b.principal()
	given := letIn{ThreadID: id, Name: cmp.Or(b.Name, id)}
	c, err := s.audited(r.Context(), "open_thread", "a thread was opened to "+string(to.Kind)+" "+to.Owner,
		map[string]any{"thread_id": id, string(to.Kind): to.Owner},
		func(tx pgx.Tx, _ string) (any, error) {
			given.ID, err = threads.Let(r.Context(), tx, id, to, given.Name, admin)
			return map[string]any{"access_id": given.ID}, err
		})
	if errors.Is(err, threads.ErrTaken) {
		return answer{}, problem.New(http.StatusConflict, "%s %s has another thread %q; give this one another name", to.Kind, to.Owner, given.Name)
	}
	return answer{body: given, status: http.StatusCreated, trace: c.TraceID}, noThread(err)
}

func (s *server) listAccess(r request) (answer, error) {
	id, err := threadIn(r)
	if err != nil {
		return answer{}, err
	}
	if _, err := threads.Get(r.Context(), s.pool, id); err != nil {
		return answer{}, noThread(err)
	}
	got, err := threads.AccessOf(r.Context(), s.pool, id)
	return answer{body: pageOf(got, "")}, err
}

func (s *server) revokeAccess(r request) (answer, error) {
	id, err := threadIn(r)
	if err != nil {
		return answer{}, err
	}
	access := r.PathValue("access_id")
	if !uuidForm.MatchString(access) {
		return answer{}, problem.New(http.StatusBadRequest, "that is not the id of an access").Kind("malformed-id", "Malformed id")
	}
	c, err := s.audited(r.Context(), "revoke_thread_access", "an access to a thread was revoked", map[string]any{"thread_id": id, "access_id": access},
		func(tx pgx.Tx, _ string) (any, error) {
			return map[string]any{"revoked": true}, threads.Revoke(r.Context(), tx, id, access)
		})
	c.Name, c.Changed = access, err == nil
	return answer{body: c, trace: c.TraceID}, noThread(err)
}

// admitting is how somebody gets into a thread of somebody else's.
func (s *server) admitting() []route {
	return []route{
		{
			method: "POST", path: "/v1/threads/{id}/join_tokens", body: inviting{}, answer: threads.Token{}, status: http.StatusCreated,
			handle: s.inviteIntoThread, repeatable: true,
			about: "Give out a join token: a visitor who sends it as X-Thread-Join gets into the conversation. It lets one visitor in, or any number until " +
				"its end, and is told once.",
		}, {
			method: "POST", path: "/v1/threads/{id}/participants", body: letting{}, answer: letIn{}, status: http.StatusCreated, handle: s.letIntoThread,
			repeatable: true, conflicts: true,
			about: "Open a conversation to a chat key, a flow or a webhook endpoint. 409 when the key or the endpoint has another one of that name.",
		}, {
			method: "GET", path: "/v1/threads/{id}/access", answer: page[threads.Access]{}, handle: s.listAccess,
			about: "Who was let into a conversation, and its join tokens, without the tokens themselves.",
		}, {
			method: "DELETE", path: "/v1/threads/{id}/access/{access_id}", answer: change{}, handle: s.revokeAccess,
			about: "Revoke an access. With a join token goes everybody whom it has let in.",
		},
	}
}
