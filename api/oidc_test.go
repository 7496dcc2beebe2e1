package api_test

import (
	"bufio"
	_ "embed"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/npmtest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/principals"
)

//go:embed testdata/provider.mjs
var providerScript string

// startIssuer runs npm oidc-provider for a callback, and returns its issuer URL.
func startIssuer(t *testing.T, callback string) string {
	t.Helper()
	run := npmtest.Command(t, providerScript, "oidc-provider@9.13.3")
	run.Env = append(run.Env, "CALLBACK="+callback)
	out, err := run.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, run.Start())
	t.Cleanup(func() { _ = run.Process.Kill(); _ = run.Wait() })
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if strings.HasPrefix(lines.Text(), "http://") {
			return lines.Text()
		}
	}
	t.Fatal("the issuer did not start")
	return ""
}

// person is a browser that logs in at the issuer.
type person struct {
	*testing.T
	base   string
	client *http.Client
}

func newPerson(t *testing.T, base string) person {
	t.Helper()
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	return person{t, base, &http.Client{Jar: jar, Timeout: pgtest.Timeout}}
}

func (p person) do(method, address string, form url.Values) (status int, body, at string) {
	p.Helper()
	r, err := http.NewRequestWithContext(p.Context(), method, address, strings.NewReader(form.Encode()))
	require.NoError(p.T, err)
	if method == http.MethodPost {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	w, err := p.client.Do(r)
	require.NoError(p.T, err)
	defer w.Body.Close()
	text, err := io.ReadAll(w.Body)
	require.NoError(p.T, err)
	return w.StatusCode, string(text), w.Request.URL.String()
}

var formAction = regexp.MustCompile(`<form[^>]*action="([^"]+)"`)

// logIn follows the issuer's forms: the login, then the consent. It returns the agent's response.
func (p person) logIn(name string) (status int, body string) {
	p.Helper()
	status, body, at := p.do("GET", p.base+"/login/oidc?next=/lanes", nil)
	for range 3 {
		if strings.HasPrefix(at, p.base) {
			return status, body
		}
		m := formAction.FindStringSubmatch(body)
		if m == nil {
			p.Fatalf("no form at %s: %d %s", at, status, body)
		}
		prompt := "consent"
		if strings.Contains(body, `name="login"`) {
			prompt = "login"
		}
		status, body, at = p.do("POST", m[1], url.Values{"prompt": {prompt}, "login": {name}, "password": {"x"}})
	}
	return status, body
}

func (p person) me() int {
	p.Helper()
	status, _, _ := p.do("GET", p.base+"/v1/me", nil)
	return status
}

func TestOIDCLogin(t *testing.T) {
	t.Parallel()
	var a *agent
	base := testkit.Serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { a.handler.ServeHTTP(w, r) }))
	issuer := startIssuer(t, base+"/login/oidc/callback")
	a = withOIDC(t, api.OIDC{
		Issuer: issuer, PublicURL: base,
		Roles: []api.ClaimRole{{Claim: "groups", Value: "support", Role: principals.Approver}},
	})
	for name, role := range map[string]principals.Role{"anna": principals.Admin, "bert": principals.Approver} {
		p := newPerson(t, base)
		status, body := p.logIn(name)
		require.Truef(t, status == 200 && strings.Contains(body, `content="0;url=/lanes"`), "%s: %d %s", name, status, body)
		who, err := principals.ByIdentity(t.Context(), a.pool, issuer, name)
		assert.Truef(t, err == nil && who.Role == role && p.me() == 200, "%s is %+v, %v", name, who, err)
		status, _, _ = p.do("GET", base+"/v1/principals", nil)
		assert.Equal(t, map[principals.Role]int{
			"admin":    200,
			"approver": 403,
		}[role], status, name, "lists principals")
		if name == "bert" {
			sessions, err := principals.Sessions(t.Context(), a.pool, who.ID)
			require.NoError(t, err)
			_, err = principals.RevokeSession(t.Context(), a.pool, sessions[0].ID, "a test")
			require.NoError(t, err)
			assert.Equal(t, 401, p.me())
			continue
		}
		p.do("POST", base+"/logout", nil)
		assert.Equal(t, 401, p.me())
	}
	stranger := newPerson(t, base)
	status, body := stranger.logIn("stranger")
	assert.Truef(t, status == 403 && strings.Contains(body, "no role") && stranger.me() == 401,
		"a stranger: %d %s", status, body)
	checkOIDCRefusals(t, base, a)
}

// checkOIDCRefusals sends callbacks that no login of this browser requested.
func checkOIDCRefusals(t *testing.T, base string, a *agent) {
	t.Helper()
	assert.Equal(t, 3, pgtest.Value[int](t, a.pool, `select count(*)::int from agent_principals`))
	other := newPerson(t, base)
	status, body, _ := other.do("GET", base+"/login/oidc/callback?code=x&state=y", nil)
	assert.Truef(t, status == 400 && other.me() == 401, "an answer that nobody asked for: %d %s", status, body)
	assert.True(t, !strings.Contains(a.log.String(), "a-secret-of-the-client"), "the log has the client's secret")
}

// A role from claims ends with them. A role from an admin stays.
func TestRoleFollowsClaims(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	in := func(subject string, role principals.Role) (principals.Principal, error) {
		return principals.LogInIdentity(t.Context(), pool,
			principals.Account{Issuer: "https://i", Subject: subject, Name: "root", Role: role})
	}
	p, err := in("1", principals.Operator)
	require.Truef(t, err == nil && p.Role == principals.Operator && p.Name != principals.Root, "%+v, %v", p, err)
	again, err := in("1", principals.Viewer)
	assert.Truef(t, err == nil && again.ID == p.ID && again.Role == principals.Viewer, "%+v, %v", again, err)
	_, err = in("1", principals.None)
	assert.Error(t, err, "an account without its group logs in")
	now, _ := principals.Find(t.Context(), pool, p.ID)
	assert.Equal(t, principals.None, now.Role, "role")
	boss, err := principals.Create(t.Context(), pool,
		principals.CreateParams{Name: "boss", Kind: principals.User, Role: principals.Admin})
	require.NoError(t, err)
	require.NoError(t, principals.LinkIdentity(t.Context(), pool, "boss", "https://i", "2", "x"))
	got, err := in("2", principals.None)
	assert.Truef(t, err == nil && got.ID == boss.ID && got.Role == principals.Admin, "%+v, %v", got, err)
}
