package api

import (
	"cmp"
	"context"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"golang.org/x/oauth2"

	"github.com/lanekeeper/lanekeeper/internal/origin"
	"github.com/lanekeeper/lanekeeper/internal/problem"
	"github.com/lanekeeper/lanekeeper/principals"
)

// OIDC configures the login at an OpenID Connect issuer, by the authorization code flow with PKCE.
type OIDC struct {
	Issuer, ClientID, ClientSecret string
	// Roles maps claims to roles. An account without a match has no role, and gets no session.
	Roles []ClaimRole
	// PublicURL is the address at which browsers reach the agent; the address of the request when empty.
	PublicURL string
	// Timeout bounds a request to the issuer; 10 s when zero.
	Timeout time.Duration
}

// ClaimRole gives a role to accounts whose claim is this value, or a list with this value.
type ClaimRole struct {
	Claim, Value string
	Role         principals.Role
}

// oidcLogin is the login at the issuer. It discovers the issuer at the first login, so the agent starts without the
// issuer.
type oidcLogin struct {
	OIDC
	provider atomic.Pointer[oidc.Provider]
}

const (
	oidcPath     = "/login/oidc"
	callbackPath = "/login/oidc/callback"
	oidcCookie   = "lanekeeper_oidc"
	oidcSeconds  = 600

	issuerTimeout = 10 * time.Second
)

// loginAttempt is the content of a cookie. So only the browser that began a login can finish it.
type loginAttempt struct{ State, Nonce, Verifier, Next string }

func (s *server) oidcRoutes() []route {
	if s.oidc == nil || s.pages == nil {
		return nil
	}
	return []route{
		{
			method: "GET", path: oidcPath, access: Public, page: true, httpHandler: http.HandlerFunc(s.beginOIDC),
			about: "Log in at the OIDC issuer.",
		}, {
			method: "GET", path: callbackPath, access: Public, page: true, httpHandler: http.HandlerFunc(s.finishOIDC),
			about: "The issuer's answer.",
		},
	}
}

// clientContext returns a context whose requests to the issuer end in time. The provider fetches keys with the context
// of its discovery.
func (o *oidcLogin) clientContext(ctx context.Context) context.Context {
	return oidc.ClientContext(ctx, &http.Client{Timeout: cmp.Or(o.Timeout, issuerTimeout)})
}

func (o *oidcLogin) config(ctx context.Context, r *http.Request) (*oauth2.Config, *oidc.Provider, error) {
	provider := o.provider.Load()
	if provider == nil {
		var err error
		if provider, err = oidc.NewProvider(o.clientContext(context.WithoutCancel(ctx)), o.Issuer); err != nil {
			return nil, nil, fmt.Errorf("discover OIDC issuer: %w", err)
		}
		o.provider.Store(provider)
	}
	base := strings.TrimSuffix(o.PublicURL, "/")
	if base == "" {
		base = map[bool]string{true: "https://", false: "http://"}[origin.ViaTLS(r)] + r.Host
	}
	return &oauth2.Config{
		ClientID: o.ClientID, ClientSecret: o.ClientSecret, Endpoint: provider.Endpoint(), RedirectURL: base + callbackPath,
		Scopes: []string{oidc.ScopeOpenID, "profile", "email"},
	}, provider, nil
}

// maxAttempt bounds the bytes of a login attempt. Browsers drop a cookie of more than 4,096, in base64 and with its
// name.
const maxAttempt = 2800

// attemptCookie returns a cookie that is Lax, because the issuer sends the browser back from another site.
func attemptCookie(r *http.Request, value string, age int) *http.Cookie {
	return &http.Cookie{
		Name: origin.CookieName(r, oidcCookie), Value: value, Path: oidcPath, MaxAge: age, HttpOnly: true,
		SameSite: http.SameSiteLaxMode, Secure: origin.ViaTLS(r),
	}
}

func (s *server) beginOIDC(w http.ResponseWriter, r *http.Request) {
	config, _, err := s.oidc.config(r.Context(), r)
	if err != nil {
		s.refuseOIDC(w, r, err)
		return
	}
	a := loginAttempt{
		State: oauth2.GenerateVerifier(), Nonce: oauth2.GenerateVerifier(), Verifier: oauth2.GenerateVerifier(),
		Next: afterLogin(r.URL.Query().Get("next")),
	}
	text, err := json.Marshal(a)
	if err == nil && len(text) > maxAttempt {
		a.Next = "/"
		text, err = json.Marshal(a)
	}
	if err != nil {
		s.pages.Refuse(w, r, err)
		return
	}
	http.SetCookie(w, attemptCookie(r, base64.RawURLEncoding.EncodeToString(text), oidcSeconds))
	http.Redirect(w, r, config.AuthCodeURL(a.State, oidc.Nonce(a.Nonce), oauth2.S256ChallengeOption(a.Verifier)),
		http.StatusSeeOther)
}

// finishOIDC checks the issuer's answer and starts a session. It responds with a page that refreshes: a redirect from
// another site would not send the strict cookie.
func (s *server) finishOIDC(w http.ResponseWriter, r *http.Request) {
	a, err := readAttempt(r)
	if err != nil {
		s.pages.Refuse(w, r, err)
		return
	}
	http.SetCookie(w, attemptCookie(r, "", -1))
	subject, name, role, err := s.oidc.verify(r, a)
	if err != nil {
		s.refuseOIDC(w, r, err)
		return
	}
	p, err := principals.LogInIdentity(r.Context(), s.pool, principals.Account{
		Issuer: s.oidc.Issuer, Subject: subject, Name: name, Role: role,
	})
	if errors.Is(err, principals.ErrInvalid) {
		s.refuseOIDC(w, r, fmt.Errorf("%w: %w", errIssuer, err))
		return
	}
	if errors.Is(err, principals.ErrInactive) {
		err = problem.New(http.StatusForbidden, "this account has no role here; ask an admin for one").Kind("no-role",
			"No role")
	}
	if err == nil {
		err = s.auth.sessions.start(w, r, principals.SessionParams{Principal: p.ID, Method: principals.WithOIDC})
	}
	if err != nil {
		s.pages.Refuse(w, r, err)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = fmt.Fprintf(w, `<!doctype html><title>Logged in</title><meta http-equiv="refresh" content="0;url=%s">`,
		html.EscapeString(a.Next)) // the write fails only if the client disconnected
}

// readAttempt returns the attempt that this browser began, if the answer belongs to it.
func readAttempt(r *http.Request) (a loginAttempt, err error) {
	var text []byte
	c, err := r.Cookie(origin.CookieName(r, oidcCookie))
	if err == nil {
		text, err = base64.RawURLEncoding.DecodeString(c.Value)
	}
	if err == nil {
		err = json.Unmarshal(text, &a)
	}
	state := r.URL.Query().Get("state")
	if err != nil || a.State == "" || subtle.ConstantTimeCompare([]byte(a.State), []byte(state)) == 0 {
		return a, problem.New(http.StatusBadRequest,
			"this login was not begun in this browser, or too long ago; log in again")
	}
	a.Next = afterLogin(a.Next)
	return a, nil
}

// errIssuer reports a login that the issuer did not confirm. errEnded reports a login that ended at the issuer, for
// example because the person cancelled it.
var (
	errIssuer = errors.New("the issuer did not log in")
	errEnded  = errors.New("the login ended at the issuer")
)

// clockLeeway is how long after its expiry an id token is accepted: the clocks of issuer and agent may differ.
const clockLeeway = time.Minute

// addClaims adds the claims of the user info. Claims of the id token take precedence.
func addClaims(claims map[string]any, info *oidc.UserInfo, subject string) error {
	if info.Subject != subject {
		return errors.New("it is of another subject")
	}
	more := map[string]any{}
	if err := info.Claims(&more); err != nil {
		return err
	}
	maps.Copy(more, claims)
	maps.Copy(claims, more)
	return nil
}

// exchangeError explains a failed exchange of a code, without the issuer's answer, which may quote secrets.
func exchangeError(err error) error {
	if transport, ok := errors.AsType[*url.Error](err); ok {
		return fmt.Errorf("exchange code: %w", transport)
	}
	rejected, ok := errors.AsType[*oauth2.RetrieveError](err)
	if !ok {
		return fmt.Errorf("%w: exchange code", errIssuer)
	}
	err = fmt.Errorf("exchange code: status %d, error %.100q", rejected.Response.StatusCode, rejected.ErrorCode)
	if rejected.Response.StatusCode >= 500 {
		return err
	}
	return fmt.Errorf("%w: %w", errIssuer, err)
}

// verify exchanges the code and checks the id token: signature, issuer, audience, expiry and nonce.
func (o *oidcLogin) verify(r *http.Request, a loginAttempt) (subject, name string, role principals.Role, err error) {
	config, provider, err := o.config(r.Context(), r)
	if err != nil {
		return "", "", "", err
	}
	code := r.URL.Query().Get("code")
	if code == "" {
		return "", "", "", fmt.Errorf("%w: %.100q", errEnded, r.URL.Query().Get("error"))
	}
	ctx := o.clientContext(r.Context())
	tokens, err := config.Exchange(ctx, code, oauth2.VerifierOption(a.Verifier))
	if err != nil {
		return "", "", "", exchangeError(err)
	}
	raw, _ := tokens.Extra("id_token").(string)
	id, err := provider.Verifier(&oidc.Config{
		ClientID: o.ClientID, Now: func() time.Time { return time.Now().Add(-clockLeeway) },
	}).Verify(ctx, raw)
	if err != nil && strings.Contains(err.Error(), "fetching keys") { // the library hides the cause from errors.As
		return "", "", "", fmt.Errorf("the id token is not checked: %w", err)
	}
	if err != nil {
		// not "token:", whose value logs redact
		return "", "", "", fmt.Errorf("%w: the id token is not valid (%w)", errIssuer, err)
	}
	if subtle.ConstantTimeCompare([]byte(id.Nonce), []byte(a.Nonce)) == 0 {
		return "", "", "", fmt.Errorf("%w: another nonce", errIssuer)
	}
	claims := map[string]any{}
	if err := id.Claims(&claims); err != nil {
		return "", "", "", fmt.Errorf("%w: read claims: %w", errIssuer, err)
	}
	if azp, ok := claims["azp"]; ok && len(id.Audience) > 1 && azp != o.ClientID {
		return "", "", "", fmt.Errorf("%w: the id token was issued to client %.100q", errIssuer, azp)
	}
	if provider.UserInfoEndpoint() != "" {
		info, err := provider.UserInfo(ctx, config.TokenSource(ctx, tokens))
		if err != nil {
			return "", "", "", fmt.Errorf("read user info: %w", err)
		}
		if err := addClaims(claims, info, id.Subject); err != nil {
			return "", "", "", fmt.Errorf("%w: user info: %w", errIssuer, err)
		}
	}
	for _, key := range []string{"preferred_username", "name", "email"} {
		if text, _ := claims[key].(string); name == "" {
			name = text
		}
	}
	return id.Subject, name, o.roleOf(claims), nil
}

// roleOf returns the strongest role that the claims give.
func (o *oidcLogin) roleOf(claims map[string]any) principals.Role {
	best := principals.None
	for _, m := range o.Roles {
		if hasClaim(claims[m.Claim], m.Value) && len(m.Role.Scopes()) > len(best.Scopes()) {
			best = m.Role
		}
	}
	return best
}

func hasClaim(given any, want string) bool {
	switch v := given.(type) {
	case string:
		return v == want
	case []any:
		return slices.Contains(v, any(want))
	}
	return false
}

// refuseOIDC logs the cause of a failed login, and reports only the failure to the browser.
func (s *server) refuseOIDC(w http.ResponseWriter, r *http.Request, err error) {
	s.log.WarnContext(r.Context(), "OIDC login failed", "error", err)
	status, detail := http.StatusBadGateway, "the OIDC issuer cannot be reached; the log has the cause"
	switch {
	case errors.Is(err, errEnded):
		status, detail = http.StatusForbidden, err.Error()+"; log in again, or ask an admin of the issuer"
	case errors.Is(err, errIssuer):
		status, detail = http.StatusForbidden, "the issuer did not confirm the login; the log has the cause"
	}
	s.pages.Refuse(w, r, problem.New(status, "%s", detail))
}
