package principals_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgproxy"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
)

func create(t *testing.T, db *pgxpool.Pool, name, kind string, role principals.Role) principals.Principal {
	t.Helper()
	p, err := principals.Create(t.Context(), db,
		principals.CreateParams{Name: name, Kind: kind, Role: role, Reason: "a test"})
	require.NoError(t, err)
	return p
}

func makeToken(t *testing.T, db *pgxpool.Pool, of string, life time.Duration, scopes ...string) (principals.Token,
	string,
) {
	t.Helper()
	made, text, err := principals.CreateToken(t.Context(), db, principals.TokenParams{
		Principal: of, Scopes: scopes, TTL: life, Reason: "a test",
	})
	require.NoError(t, err)
	return made, text
}

func TestRightsAreRoleAndScopes(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kind   string
		role   principals.Role
		scopes []string
		want   string
	}{
		"all of a viewer":    {principals.User, principals.Viewer, []string{"*"}, "runs:read approvals:read"},
		"narrowed admin":     {principals.User, principals.Admin, []string{"runs:read"}, "runs:read"},
		"more than the role": {principals.User, principals.Viewer, []string{"runs:read", "admin", "operate"}, "runs:read"},
		"nobody":             {principals.User, principals.None, []string{"*"}, ""},
		"approver": {
			principals.User, principals.Approver,
			[]string{"*"},
			"runs:read threads:read approvals:read approvals:decide",
		},
		"worker":                 {principals.Service, principals.None, []string{"work:external:sum*"}, "work:external:sum*"},
		"user that would work":   {principals.User, principals.Operator, []string{"work:*"}, ""},
		"service has no work":    {principals.Service, principals.Viewer, []string{"*"}, "runs:read approvals:read"},
		"operator cannot decide": {principals.User, principals.Operator, []string{"approvals:decide"}, ""},
	} {
		who := principals.Caller{Principal: principals.Principal{Kind: c.kind, Role: c.role}, Scopes: c.scopes}
		assert.Equal(t, name+": "+c.want, name+": "+strings.Join(who.Effective(), " "))
		for _, s := range principals.Admin.Scopes() {
			has := slices.ContainsFunc(who.Effective(), func(e string) bool { return strings.HasPrefix(e+":", string(s)+":") })
			assert.Equal(t, has, who.May(s), name, s)
		}
	}
	worker := principals.Caller{
		Principal: principals.Principal{Kind: principals.Service}, Scopes: []string{"work:external:sum*"},
	}
	for flow, want := range map[string]bool{
		"external:sum": true, "external:sum2": true, "external:other": false,
		"external": false,
	} {
		assert.Equal(t, want, worker.MayWork(flow))
	}
}

func TestATokenEndsAtOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	create(t, db, "ci", principals.Service, principals.Operator)
	made, text := makeToken(t, db, "ci", 0, "runs:*")
	assert.Equal(t, "[runs:read runs:write]", fmt.Sprint(made.Scopes))
	who, err := principals.AuthenticateToken(t.Context(), db, text)
	require.NoError(t, err)
	assert.Truef(t, who.Name == "ci" && who.TokenID == made.ID && who.May(principals.RunsWrite) &&
		!who.May(principals.Operate), "caller is %+v", who)
	assert.True(t, !pgtest.Value[bool](t, db, `select exists (select from agent_tokens where last_used_at is null)`),
		"the use is not noted")
	secret := text[strings.LastIndexByte(text, '_')+1:]
	n := pgtest.Value[int](t, db, `select count(*)::int from agent_activity a where a::text like '%' || $1 || '%'`, secret)
	assert.True(t, n == 0, "the secret is in the activity log")
	for _, wrong := range []string{
		"", "lk_", "lk__", text + "A", text[:len(text)-1], "lk_" + made.ID + "_",
		strings.ToUpper(text), text[3:], "lk_\xff_" + secret,
	} {
		_, err := principals.AuthenticateToken(t.Context(), db, wrong)
		assert.ErrorIs(t, err, principals.ErrNotFound, wrong)
	}
	bob := activity.WithActor(t.Context(), activity.Actor{Name: "bob"})
	changed, err := principals.RevokeToken(bob, db, made.ID, "it leaked")
	assert.Truef(t, err == nil && changed, "revoke: %v, %v", changed, err)
	_, err = principals.AuthenticateToken(t.Context(), db, text)
	assert.ErrorIs(t, err, principals.ErrInactive, "a revoked token")
	root := activity.WithActor(t.Context(), activity.Actor{Name: principals.Root})
	_, err = principals.RevokeToken(root, db, made.ID, "it leaked again") // changes nothing
	require.NoError(t, err)
	ended, err := principals.Ended(t.Context(), db, who)
	assert.Truef(t, err == nil && ended != nil && ended.By == "bob" && ended.Reason == "the token of ci was revoked",
		"it ended with %+v, %v", ended, err)
	_, expired := makeToken(t, db, "ci", time.Millisecond, "*")
	pgtest.Exec(t, db, `select pg_sleep(0.01)`)
	_, err = principals.AuthenticateToken(t.Context(), db, expired)
	assert.ErrorIs(t, err, principals.ErrInactive, "an expired token")
	made, other := makeToken(t, db, "ci", time.Hour, "*")
	who, err = principals.AuthenticateToken(t.Context(), db, other)
	require.NoError(t, err)
	assert.Truef(t, who.ExpiresAt.Equal(*made.ExpiresAt), "it expires at %s, not %s", who.ExpiresAt, made.ExpiresAt)
	_, err = principals.SetEnabled(t.Context(), db, "ci", false, "no longer needed")
	require.NoError(t, err)
	_, err = principals.AuthenticateToken(t.Context(), db, other)
	assert.ErrorIs(t, err, principals.ErrInactive, "a token of a disabled principal")
}

func TestASessionEnds(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	anna := create(t, db, "anna", principals.User, principals.Approver)
	in := func() (string, *principals.Caller) {
		secret, err := principals.LogIn(t.Context(), db, principals.SessionParams{
			Principal: anna.ID, Method: principals.WithOIDC, Address: "192.0.2.1", Browser: "a\x00b\nc",
		})
		require.NoError(t, err)
		who, err := principals.AuthenticateSession(t.Context(), db, secret, nil)
		require.NoError(t, err)
		return secret, who
	}
	gone := func(what, secret string, who *principals.Caller, reason, by string) {
		t.Helper()
		_, err := principals.AuthenticateSession(t.Context(), db, secret, nil)
		assert.ErrorIs(t, err, principals.ErrNotFound, what)
		ended, err := principals.Ended(t.Context(), db, who)
		assert.Truef(t, err == nil && ended != nil && strings.Contains(ended.Reason, reason) && ended.By == by,
			"%s: a stream ended with %+v, %v", what, ended, err)
	}
	secret, who := in()
	ended, err := principals.Ended(t.Context(), db, who)
	assert.Truef(t, err == nil && ended == nil && who.May(principals.ApprovalsDecide), "ended: %+v, %v", ended, err)
	root := activity.WithActor(t.Context(), activity.Actor{Name: principals.Root})
	_, err = principals.RevokeSession(root, db, who.SessionID, "a lost phone")
	require.NoError(t, err)
	gone("revoked", secret, who, "the session of anna was revoked", principals.Root)
	secret, who = in()
	require.NoError(t, principals.LogOut(t.Context(), db, who))
	gone("logged out", secret, who, "was revoked", "")
	secret, who = in()
	pgtest.Exec(t, db, `update agent_sessions set expires_at = clock_timestamp() where id::text = $1`, who.SessionID)
	gone("expired", secret, who, "the session of anna expired", "")
	secret, who = in()
	_, err = principals.SetRole(root, db, "anna", principals.Viewer, "another job")
	require.NoError(t, err)
	ended, err = principals.Ended(t.Context(), db, who)
	assert.Truef(t, err == nil && ended != nil && ended.By == principals.Root &&
		ended.Reason == "the role of anna changed from approver to viewer", "a stream ended with %+v, %v", ended, err)
	_, err = principals.SetEnabled(root, db, "anna", false, "she left")
	require.NoError(t, err)
	gone("disabled", secret, who, "anna was disabled", principals.Root)
	_, err = principals.LogIn(t.Context(), db, principals.SessionParams{Principal: anna.ID, Method: principals.WithLink})
	assert.ErrorIs(t, err, principals.ErrInactive, "a login of a disabled principal")
}

// A read-only or full database cannot note the use of a credential. Its owner may still read.
func TestAReadOnlyDatabaseAuthenticates(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	create(t, db, "anna", principals.User, principals.Viewer)
	_, token := makeToken(t, db, "anna", 0, "*")
	secret, err := principals.LogIn(t.Context(), db,
		principals.SessionParams{Principal: "anna", Method: principals.WithLink})
	require.NoError(t, err)
	pgtest.Exec(t, db, `update agent_sessions set last_seen_at = last_seen_at - interval '1 hour'`)
	config := db.Config()
	config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	readOnly, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer readOnly.Close()
	_, err = principals.AuthenticateToken(t.Context(), readOnly, token)
	assert.NoError(t, err, "a token")
	_, err = principals.AuthenticateSession(t.Context(), readOnly, secret, nil)
	assert.NoError(t, err, "a session")
}

func TestALinkLogsInOnce(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	create(t, db, "anna", principals.User, principals.Viewer)
	secret, _, err := principals.CreateLink(t.Context(), db, "anna", "she asked")
	require.NoError(t, err)
	logIn := func(link string) (string, error) {
		return principals.LogIn(t.Context(), db, principals.SessionParams{Link: link, Method: principals.WithLink})
	}
	cookie, err := logIn(secret)
	require.NoError(t, err)
	who, err := principals.AuthenticateSession(t.Context(), db, cookie, nil)
	require.NoError(t, err)
	assert.Equal(t, "anna", who.Name)
	late, _, err := principals.CreateLink(t.Context(), db, "anna", "she asked")
	require.NoError(t, err)
	pgtest.Exec(t, db, `update agent_login_links set expires_at = clock_timestamp() where used_at is null`)
	for what, s := range map[string]string{"used": secret, "expired": late, "wrong": "x"} {
		_, err := logIn(s)
		assert.ErrorIs(t, err, principals.ErrNotFound, what)
	}
	_, _, err = principals.CreateLink(t.Context(), db, principals.Root, "x")
	assert.ErrorIs(t, err, principals.ErrInvalid, "a link of root")
}

func TestLoginByLinkSurvivesLostCommit(t *testing.T) {
	t.Parallel()
	address := pgtest.URL(t)
	db := pgtest.Pool(t, address, postgres.Options{})
	create(t, db, "anna", principals.User, principals.Viewer)
	link, _, err := principals.CreateLink(t.Context(), db, "anna", "she asked")
	require.NoError(t, err)
	var lose atomic.Bool
	lose.Store(true)
	proxy := pgproxy.LoseCommit(t, address, &lose)
	lossy := pgtest.Pool(t, proxy.URL(""), postgres.Options{})
	cookie, err := principals.LogIn(t.Context(), lossy, principals.SessionParams{Link: link, Method: principals.WithLink})
	require.NoError(t, err)
	assert.True(t, !lose.Load(), "no commit lost its response")
	_, err = principals.AuthenticateSession(t.Context(), db, cookie, nil)
	assert.NoError(t, err)
	assert.Equal(t, 1, pgtest.Value[int](t, db, `select count(*)::int from agent_sessions`))
}

func TestAnIdentityHasOnePrincipal(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	create(t, db, "anna", principals.User, principals.Approver)
	create(t, db, "bert", principals.User, principals.Viewer)
	require.NoError(t, principals.LinkIdentity(t.Context(), db, "anna", "slack:T1", "U1", "she asked"))
	p, err := principals.ByIdentity(t.Context(), db, "slack:T1", "U1")
	assert.Truef(t, err == nil && p.Name == "anna" && p.Role.May(principals.ApprovalsDecide), "%+v, %v", p, err)
	assert.ErrorIs(t, principals.LinkIdentity(t.Context(), db, "bert", "slack:T1", "U1", "x"), principals.ErrTaken)
	for _, other := range [][2]string{{"slack:T2", "U1"}, {"slack:T1", "U2"}, {"", ""}} {
		_, err := principals.ByIdentity(t.Context(), db, other[0], other[1])
		assert.ErrorIs(t, err, principals.ErrNotFound, other)
	}
	_, err = principals.SetEnabled(t.Context(), db, "anna", false, "she left")
	require.NoError(t, err)
	_, err = principals.ByIdentity(t.Context(), db, "slack:T1", "U1")
	assert.ErrorIs(t, err, principals.ErrNotFound, "of a disabled principal")
}

func TestFirstLoginsAreTheirOwn(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	create(t, db, "anna", principals.User, principals.Admin)
	account := principals.Account{Issuer: "https://id.test", Subject: "7", Name: "anna", Role: principals.Viewer}
	var logins sync.WaitGroup
	for range 8 {
		logins.Go(func() {
			p, err := principals.LogInIdentity(t.Context(), db, account)
			assert.NoError(t, err)
			assert.True(t, strings.HasPrefix(p.Name, "anna-"), p.Name)
		})
	}
	logins.Wait()
	pgtest.Equal(t, db, 0, `select count(*)::int from agent_audit where act = 'create_principal' and actor = 'anna'`)
}

// The name of an account names the decisions of its principal, so it keeps the letters of all scripts.
func TestNamesOfAccountsKeepTheirLetters(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, want := range map[string]string{
		"Zoë": "Zoë", "Иван Петров": "Иван-Петров", "李雷": "李雷", " - ": "user-", "a\u202e\u00a0b\xff": "a-b",
		strings.Repeat("é", 50): strings.Repeat("é", 40), "x" + strings.Repeat("é", 50): "x" + strings.Repeat("é", 39),
	} {
		p, err := principals.LogInIdentity(t.Context(), db, principals.Account{
			Issuer: "https://id.test", Subject: fmt.Sprintf("%x", name), Name: name, Role: principals.Viewer,
		})
		require.NoError(t, err)
		if want == "user-" {
			assert.True(t, strings.HasPrefix(p.Name, want), p.Name)
		} else {
			assert.Equal(t, want, p.Name)
		}
	}
}

func TestRootAndReservedNamesStay(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	anna := create(t, db, "anna", principals.User, principals.Admin)
	for what, err := range map[string]error{
		"disable root": second(principals.SetEnabled(t.Context(), db, principals.Root, false, "x")),
		"demote root":  second(principals.SetRole(t.Context(), db, principals.Root, principals.Viewer, "x")),
		"admin": second(principals.Create(t.Context(), db,
			principals.CreateParams{Name: "admin", Kind: principals.User, Role: principals.Viewer})),
		"spaces": second(principals.Create(t.Context(), db,
			principals.CreateParams{Name: "a b", Kind: principals.User, Role: principals.Viewer})),
		"an id": second(principals.Create(t.Context(), db,
			principals.CreateParams{Name: anna.ID, Kind: principals.User, Role: principals.Viewer})),
		"no role": second(principals.Create(t.Context(), db,
			principals.CreateParams{Name: "a", Kind: principals.User, Role: "boss"})),
	} {
		assert.ErrorIs(t, err, principals.ErrInvalid, what)
	}
}

func second(_ principals.Principal, err error) error { return err }

func TestChangesAreAudited(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	boss := &principals.Caller{Principal: principals.Principal{Name: "boss", Role: principals.Admin}, TokenID: "abc"}
	ctx := principals.WithCaller(t.Context(), boss, "http")
	_, err := principals.Create(ctx, db, principals.CreateParams{
		Name: "anna", Kind: principals.User, Role: principals.Viewer,
		Reason: "new",
	})
	require.NoError(t, err)
	pgtest.Equal(t, db, "create_principal by boss with abc via http: new, principal anna",
		`select act || ' by ' || actor || ' with ' || token_id || ' via ' || via || ': ' || reason || ', ' || object
		   from agent_audit where act = 'create_principal'`)
	a := activity.ActorFrom(context.Background())
	assert.Truef(t, a.Name == activity.Admin, "nobody is %+v", a)
}
