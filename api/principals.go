package api

import (
	"cmp"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// me describes the caller.
type me struct {
	Name      string     `json:"name"`
	Kind      string     `json:"kind"`
	Role      string     `json:"role"`
	Scopes    []string   `json:"scopes" doc:"role ∩ scopes of the token"`
	TokenID   string     `json:"token_id,omitempty"`
	SessionID string     `json:"session_id,omitempty"`
	ExpiresAt *time.Time `json:"expires_at" doc:"of the session or token"`
}

func (s *server) getMe(r request) (response, error) {
	caller := principals.From(r.Context())
	m := me{
		Name: caller.Name, Kind: caller.Kind, Role: string(caller.Role), Scopes: caller.Effective(), TokenID: caller.TokenID,
		SessionID: caller.SessionID,
	}
	if !caller.ExpiresAt.IsZero() {
		m.ExpiresAt = &caller.ExpiresAt
	}
	return response{body: m}, nil
}

// principalDetail is a principal with its credentials.
type principalDetail struct {
	principals.Principal
	Identities []principals.Identity `json:"identities"`
	Tokens     []principals.Token    `json:"tokens"`
	Sessions   []principals.Session  `json:"sessions"`
}

type newPrincipal struct {
	Name   string          `json:"name"`
	Kind   string          `json:"kind,omitempty" doc:"user (default) or service"`
	Role   principals.Role `json:"role"`
	Reason string          `json:"reason"`
}

type principalPatch struct {
	Role    *principals.Role `json:"role,omitempty"`
	Enabled *bool            `json:"enabled,omitempty"`
	Reason  string           `json:"reason"`
}

type identityRequest struct {
	Issuer  string `json:"issuer"`
	Subject string `json:"subject"`
	Reason  string `json:"reason"`
}

type tokenRequest struct {
	Principal string          `json:"principal"`
	Name      string          `json:"name,omitempty"`
	Scopes    []string        `json:"scopes"`
	ExpiresIn json.RawMessage `json:"expires_in,omitempty" doc:"seconds, or text such as 90d; without it the token does not expire"`
	Reason    string          `json:"reason"`
}

// newToken holds a token's text, once.
type newToken struct {
	principals.Token
	Text string `json:"token"`
}

type loginLink struct {
	Path      string    `json:"path" doc:"of the login page, with the secret"`
	ExpiresAt time.Time `json:"expires_at"`
}

func (b newPrincipal) check() error    { return reasonRequest{b.Reason}.check() }
func (b principalPatch) check() error  { return reasonRequest{b.Reason}.check() }
func (b identityRequest) check() error { return reasonRequest{b.Reason}.check() }
func (b tokenRequest) check() error    { return reasonRequest{b.Reason}.check() }

// principalError maps errors of package principals to problems.
func principalError(err error) error {
	switch {
	case errors.Is(err, principals.ErrNotFound):
		return problem.New(http.StatusNotFound, "%s", principals.ErrNotFound)
	case errors.Is(err, principals.ErrInvalid):
		return problem.BadBody("%s", strings.TrimPrefix(innermost(err), "invalid: "))
	case errors.Is(err, principals.ErrTaken):
		return problem.New(http.StatusConflict, "%s", strings.TrimPrefix(innermost(err), "taken: "))
	}
	return err
}

// innermost returns the text of an error from its sentinel on, without the wrapping text.
func innermost(err error) string {
	text := err.Error()
	for _, word := range []string{"invalid: ", "taken: "} {
		if _, after, found := strings.Cut(text, word); found {
			return word + after
		}
	}
	return text
}

// withID gives a handler the name or id in the path.
func withID(handle func(r request, id string) (response, error)) func(request) (response, error) {
	return func(r request) (response, error) {
		id, err := pathName(r, principals.ErrNotFound)
		if err != nil {
			return response{}, principalError(err)
		}
		return handle(r, id)
	}
}

// withRow adds the trace and the row of an act of package principals to the response.
func withRow(handle func(request) (response, error)) func(request) (response, error) {
	return func(r request) (response, error) {
		var row activity.Recorded
		r.Request = r.WithContext(activity.WithRecorded(r.Context(), &row))
		resp, err := handle(r)
		resp.trace = row.TraceID
		if c, ok := resp.body.(change); ok {
			c.TraceID, c.ActivityID = row.TraceID, row.ActivityID
			resp.body = c
		}
		return resp, err
	}
}

func (s *server) listPrincipals(r request) (response, error) {
	list, err := principals.List(r.Context(), s.pool)
	return response{body: pageOf(list, "")}, err
}

func (s *server) getPrincipal(r request, id string) (response, error) {
	p, err := principals.Find(r.Context(), s.pool, id)
	if err != nil {
		return response{}, principalError(err)
	}
	d := principalDetail{Principal: p}
	if d.Identities, err = principals.Identities(r.Context(), s.pool, p.ID); err == nil {
		if d.Tokens, err = principals.Tokens(r.Context(), s.pool, p.ID); err == nil {
			d.Sessions, err = principals.Sessions(r.Context(), s.pool, p.ID)
		}
	}
	d.Identities, d.Tokens, d.Sessions = orEmpty(d.Identities), orEmpty(d.Tokens), orEmpty(d.Sessions)
	return response{body: d}, err
}

func (s *server) createPrincipal(r request) (response, error) {
	b := r.body.(newPrincipal)
	b.Kind = cmp.Or(b.Kind, principals.User)
	p, err := principals.Create(r.Context(), s.pool,
		principals.CreateParams{Name: b.Name, Kind: b.Kind, Role: b.Role, Reason: b.Reason})
	return response{body: p, status: http.StatusCreated}, principalError(err)
}

// changePrincipal sets a principal's role, or disables or enables the principal.
func (s *server) changePrincipal(r request, id string) (response, error) {
	b := r.body.(principalPatch)
	if (b.Role == nil) == (b.Enabled == nil) {
		return response{}, problem.BadBody("send role or enabled")
	}
	var p principals.Principal
	var err error
	if b.Role != nil {
		p, err = principals.SetRole(r.Context(), s.pool, id, *b.Role, b.Reason)
	} else {
		p, err = principals.SetEnabled(r.Context(), s.pool, id, *b.Enabled, b.Reason)
	}
	return response{body: p}, principalError(err)
}

func (s *server) linkIdentity(r request, id string) (response, error) {
	b := r.body.(identityRequest)
	err := principals.LinkIdentity(r.Context(), s.pool, id, b.Issuer, b.Subject, b.Reason)
	return response{body: change{Name: b.Subject, Changed: true}}, principalError(err)
}

func (s *server) unlinkIdentity(r request, id string) (response, error) {
	b := r.body.(identityRequest)
	err := principals.UnlinkIdentity(r.Context(), s.pool, id, b.Issuer, b.Subject, b.Reason)
	return response{body: change{Name: b.Subject, Changed: true}}, principalError(err)
}

func (s *server) createLoginLink(r request, id string) (response, error) {
	secret, until, err := principals.CreateLink(r.Context(), s.pool, id, r.body.(reasonRequest).Reason)
	return response{
		body: loginLink{loginPath + "?link=" + secret, until}, status: http.StatusCreated,
	}, principalError(err)
}

func (s *server) listTokens(r request) (response, error) {
	tokens, err := principals.Tokens(r.Context(), s.pool, r.query["principal"])
	return response{body: pageOf(tokens, "")}, err
}

func (s *server) createToken(r request) (response, error) {
	b := r.body.(tokenRequest)
	life, err := readDuration("expires_in", b.ExpiresIn)
	if err != nil {
		return response{}, err
	}
	created, text, err := principals.CreateToken(r.Context(), s.pool, principals.TokenParams{
		Principal: b.Principal, Name: b.Name, Scopes: b.Scopes, TTL: life, Reason: b.Reason,
	})
	return response{body: newToken{created, text}, status: http.StatusCreated}, principalError(err)
}

func (s *server) revokeToken(r request, id string) (response, error) {
	changed, err := principals.RevokeToken(r.Context(), s.pool, id, r.body.(reasonRequest).Reason)
	return response{body: change{Name: id, Changed: changed}}, principalError(err)
}

func (s *server) listSessions(r request) (response, error) {
	rows, err := principals.Sessions(r.Context(), s.pool, r.query["principal"])
	return response{body: pageOf(rows, "")}, err
}

func (s *server) revokeSession(r request, id string) (response, error) {
	changed, err := principals.RevokeSession(r.Context(), s.pool, id, r.body.(reasonRequest).Reason)
	return response{body: change{Name: id, Changed: changed}}, principalError(err)
}

// principalRoutes returns the routes that manage principals and their rights.
func (s *server) principalRoutes() []route {
	of := []param{textParam("principal", "Name or id of a principal")}
	list := []route{
		{
			method: "GET", path: "/v1/me", response: me{}, handle: s.getMe,
			about: "The caller: its principal, role and scopes.",
		}, {
			method: "GET", path: "/v1/principals", response: page[principals.Principal]{}, handle: s.listPrincipals,
			about: "Principals by name.",
		}, {
			method: "POST", path: "/v1/principals", body: newPrincipal{}, response: principals.Principal{},
			status: http.StatusCreated, handle: s.createPrincipal, conflicts: true,
			about: "Create a principal: a user or a service, with a role. 409 if the name is taken.",
		}, {
			method: "GET", path: "/v1/principals/{id}", response: principalDetail{}, handle: withID(s.getPrincipal),
			about: "One principal by name or id, with its identities, tokens and sessions.",
		}, {
			method: "PATCH", path: "/v1/principals/{id}", body: principalPatch{}, response: principals.Principal{},
			handle: withID(s.changePrincipal),
			about:  "Set the role of a principal, or disable or enable it. Tokens and sessions follow at once.",
		}, {
			method: "POST", path: "/v1/principals/{id}/identities", body: identityRequest{}, response: change{},
			handle: withID(s.linkIdentity), conflicts: true,
			about: "Link an account elsewhere, by issuer and subject, to a principal. 409 if another principal has it.",
		}, {
			method: "DELETE", path: "/v1/principals/{id}/identities", body: identityRequest{}, response: change{},
			handle: withID(s.unlinkIdentity), about: "Unlink an account.",
		}, {
			method: "POST", path: "/v1/principals/{id}/login_links", body: reasonRequest{}, response: loginLink{},
			status: http.StatusCreated, handle: withID(s.createLoginLink),
			secret: "the link expires within 15 minutes; create another one under a new key",
			about:  "Create a link that logs in a user once, within 15 minutes.",
		}, {
			method: "GET", path: "/v1/tokens", response: page[principals.Token]{}, handle: s.listTokens, params: of,
			about: "API tokens, newest first. Their secrets are stored nowhere.",
		}, {
			method: "POST", path: "/v1/tokens", body: tokenRequest{}, response: newToken{},
			status: http.StatusCreated, handle: s.createToken, notFound: true,
			secret: "find the token with GET /v1/tokens, revoke it, and create another one under a new key",
			about:  "Create an API token. This response alone has its text. Scopes narrow the role: *, runs:read, work:GLOB, …",
		}, {
			method: "POST", path: "/v1/tokens/{id}/revoke", body: reasonRequest{}, response: change{},
			handle: withID(s.revokeToken),
			about:  "Revoke an API token, at once and everywhere.",
		}, {
			method: "GET", path: "/v1/sessions", response: page[principals.Session]{}, handle: s.listSessions, params: of,
			about: "Sessions of browsers, newest first.",
		}, {
			method: "POST", path: "/v1/sessions/{id}/revoke", body: reasonRequest{}, response: change{},
			handle: withID(s.revokeSession),
			about:  "End a session, at once and everywhere.",
		},
	}
	for i := range list {
		list[i].handle = withRow(list[i].handle)
	}
	return list
}
