package api_test

import (
	"cmp"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
)

// issuer is an OIDC issuer that logs everyone in as its subject. userInfo serves further claims.
type issuer struct {
	url, nonce string
	subject    string
	audience   string // JSON
	expiry     time.Duration
	query      string // of the callback
	key        *rsa.PrivateKey
	userInfo   http.HandlerFunc
	faults     map[string]http.HandlerFunc // by path
}

func newIssuer(t *testing.T) *issuer {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	require.NoError(t, err)
	i := &issuer{key: key, subject: "7", audience: `"agent"`, expiry: time.Minute, query: "code=c"}
	mux := http.NewServeMux()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if fault := i.faults[r.URL.Path]; fault != nil {
			fault(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	i.url = server.URL
	respond := func(w http.ResponseWriter, v any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(v)
	}
	mux.HandleFunc("GET /.well-known/openid-configuration", func(w http.ResponseWriter, _ *http.Request) {
		respond(w, map[string]any{
			"issuer": i.url, "authorization_endpoint": i.url + "/auth", "token_endpoint": i.url + "/token",
			"jwks_uri": i.url + "/keys", "userinfo_endpoint": i.url + "/me",
			"id_token_signing_alg_values_supported": []string{"RS256"},
		})
	})
	mux.HandleFunc("GET /keys", func(w http.ResponseWriter, _ *http.Request) {
		respond(w, map[string]any{"keys": []any{map[string]string{
			"kty": "RSA", "kid": "1", "alg": "RS256", "use": "sig", "n": raw64(key.N.Bytes()),
			"e": raw64(big.NewInt(int64(key.E)).Bytes()),
		}}})
	})
	mux.HandleFunc("POST /token", func(w http.ResponseWriter, _ *http.Request) {
		respond(w, map[string]any{
			"access_token": "an-access-token", "token_type": "Bearer", "expires_in": 60, "id_token": i.token(),
		})
	})
	mux.HandleFunc("GET /me", func(w http.ResponseWriter, r *http.Request) { i.userInfo(w, r) })
	return i
}

func raw64(b []byte) string { return base64.RawURLEncoding.EncodeToString(b) }

// token returns the id token of the subject, without groups.
func (i *issuer) token() string {
	claims := fmt.Sprintf(`{"iss":%q,"sub":%q,"aud":%s,"nonce":%q,"exp":%d,"name":"Ana"}`, i.url, i.subject, i.audience,
		i.nonce, time.Now().Add(i.expiry).Unix())
	signed := raw64([]byte(`{"alg":"RS256","kid":"1"}`)) + "." + raw64([]byte(claims))
	sum := sha256.Sum256([]byte(signed))
	signature, err := rsa.SignPKCS1v15(nil, i.key, crypto.SHA256, sum[:])
	if err != nil {
		panic(err)
	}
	return signed + "." + raw64(signature)
}

// logIn runs a login. It returns the agent's response to the issuer's callback, or to the first request if that failed.
func (i *issuer) logIn(t *testing.T, a *agent) *httptest.ResponseRecorder {
	t.Helper()
	began := a.raw("GET", "/login/oidc", "", nil)
	if began.Code != http.StatusSeeOther {
		return began
	}
	to, err := url.Parse(began.Header().Get("Location"))
	require.NoError(t, err)
	i.nonce = to.Query().Get("nonce")
	back := http.Header{}
	for _, c := range began.Result().Cookies() {
		back.Add("Cookie", c.Name+"="+c.Value)
	}
	return a.raw("GET", "/login/oidc/callback?"+i.query+"&state="+url.QueryEscape(to.Query().Get("state")), "", back)
}

// withOIDC starts an agent with an issuer. The issuer's group agents are its admins.
func withOIDC(t *testing.T, o api.OIDC) *agent {
	t.Helper()
	pool := pgtest.DB(t)
	o.ClientID, o.ClientSecret = "agent", "a-secret-of-the-client"
	o.PublicURL = cmp.Or(o.PublicURL, "http://agent.example")
	o.Roles = append(o.Roles, api.ClaimRole{Claim: "groups", Value: "agents", Role: principals.Admin})
	return newAgentWith(t, api.Options{Pool: pool, Engine: engine(t, pool), Pages: errorPages{}, OIDC: &o})
}

// answers responds with a status and JSON.
func answers(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}
}

// An issuer that hangs delays only its own login, for a bounded time. The log has the issuer's error.
func TestFailedIssuerDoesNotBlockLaterLogins(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	i.userInfo = answers(200, `{"sub":"7","groups":["agents"]}`)
	a := withOIDC(t, api.OIDC{Issuer: i.url, Timeout: 3 * time.Second}) // long, for a busy machine
	hang := func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // so that the server notices a disconnect
		<-r.Context().Done()
	}
	refuse := answers(401, `{"error":"invalid_client","error_description":"a-secret-of-the-client is old"}`)
	down := answers(503, "")
	for _, test := range []struct {
		path   string
		fault  http.HandlerFunc
		status int
	}{
		{"/.well-known/openid-configuration", hang, 502},
		{"/token", hang, 502},
		{"/token", refuse, 403},
		{"/token", down, 502},
		{"/keys", hang, 502},
		{"/keys", down, 502},
		{"/me", hang, 502},
	} {
		i.faults = map[string]http.HandlerFunc{test.path: test.fault}
		got := i.logIn(t, a)
		assert.Truef(t, got.Code == test.status, "%s: %d %s", test.path, got.Code, got.Body)
	}
	i.faults = nil
	pgtest.Eventually(t, func() bool { return i.logIn(t, a).Code == 200 }, "a later login succeeds")
	i.subject = "no subject" // it has a space
	i.userInfo = answers(200, `{"sub":"no subject"}`)
	got := i.logIn(t, a)
	assert.Truef(t, got.Code == 403, "a subject that cannot be: %d %s", got.Code, got.Body)
	body := a.log.String()
	assert.Contains(t, body, "invalid_client", "issuer and subject have")
	assert.True(t, !strings.Contains(body, "a-secret-of-the-client"), "the log has the client's secret")
}

// The page names the end of a login at the issuer. A clock that is somewhat late ends no login.
func TestLoginsFailWithTheirCause(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	i.userInfo = answers(200, `{"sub":"7","groups":["agents"]}`)
	a := withOIDC(t, api.OIDC{Issuer: i.url})
	i.query = "error=access_denied"
	assert.Contains(t, i.logIn(t, a).Body.String(), `the login ended at the issuer: "access_denied"`)
	i.query = "code=c"
	i.expiry = -time.Hour
	assert.Contains(t, i.logIn(t, a).Body.String(), "the log has the cause")
	i.expiry, i.audience = -time.Second, `["other","agent"],"azp":"other"`
	assert.Equal(t, 403, i.logIn(t, a).Code, "a token of another client")
	i.audience = `["other","agent"],"azp":"agent"`
	assert.Equal(t, 200, i.logIn(t, a).Code)
}

// Browsers drop a cookie of more than 4,096 bytes.
func TestLongAddressLeavesCookieOfLoginShort(t *testing.T) {
	t.Parallel()
	a := withOIDC(t, api.OIDC{Issuer: newIssuer(t).url})
	for _, next := range []string{"/lanes", "/lanes?q=" + strings.Repeat("&", 1000)} {
		began := a.raw("GET", "/login/oidc?next="+url.QueryEscape(next), "", nil)
		require.Equal(t, http.StatusSeeOther, began.Code)
		size := len(began.Header().Get("Set-Cookie"))
		assert.Truef(t, size > 100 && size <= 4096, "%.20s: a cookie of %d bytes", next, size)
	}
}

// A login fails if its user info cannot be read or has another subject: its claims could grant a role.
func TestFailedUserInfoRejectsLogin(t *testing.T) {
	t.Parallel()
	i := newIssuer(t)
	a := withOIDC(t, api.OIDC{Issuer: i.url})
	for name, test := range map[string]struct {
		status int
		body   string
		in     bool
	}{
		"broken":          {500, `{}`, false},
		"no JSON":         {200, `<html>`, false},
		"another subject": {200, `{"sub":"8","groups":["agents"]}`, false},
		"a member":        {200, `{"sub":"7","groups":["agents"]}`, true},
	} {
		i.userInfo = answers(test.status, test.body)
		got := i.logIn(t, a)
		sessions := pgtest.Value[int](t, a.pool, `select count(*)::int from agent_sessions`)
		assert.Truef(t, (got.Code == http.StatusOK) == test.in && sessions == map[bool]int{true: 1}[test.in],
			"%s: %d %s, %d sessions", name, got.Code, got.Body, sessions)
		assert.Truef(t, test.in || strings.Contains(got.Body.String(), "issuer"),
			"%s does not say whose answer failed: %s", name, got.Body)
		pgtest.Exec(t, a.pool, `delete from agent_sessions`)
	}
	if body := a.log.String(); !strings.Contains(body, "user info") || strings.Contains(body, "an-access-token") {
		t.Errorf("the log says %s", body)
	}
}
