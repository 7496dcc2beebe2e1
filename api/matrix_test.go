package api_test

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
)

// rights lists the roles that may call routes of each scope. The list is deliberately a second copy.
var rights = map[string]string{
	"authenticated":    "none viewer operator approver admin root worker",
	"runs:read":        "viewer operator approver admin root",
	"runs:write":       "operator admin root",
	"threads:read":     "operator approver admin root",
	"threads:write":    "operator admin root",
	"operate":          "operator admin root",
	"approvals:read":   "viewer operator approver admin root",
	"approvals:decide": "approver admin root",
	"admin":            "admin root",
	"work":             "worker admin root",
}

// key adds a principal with a token, and returns the token.
func (a *agent) key(kind string, role principals.Role, life time.Duration, scopes ...string) (name, text string) {
	a.t.Helper()
	name = fmt.Sprintf("p%d", pgtest.Value[int](a.t, a.pool, `select count(*)::int from agent_principals`))
	_, err := principals.Create(a.t.Context(), a.pool,
		principals.CreateParams{Name: name, Kind: kind, Role: role, Reason: "a test"})
	require.NoError(a.t, err)
	_, text, err = principals.CreateToken(a.t.Context(), a.pool, principals.TokenParams{
		Principal: name, Scopes: scopes, TTL: life, Reason: "a test",
	})
	require.NoError(a.t, err)
	return name, text
}

// callers are tokens of each role, and tokens without rights.
func (a *agent) callers() map[string]string {
	a.t.Helper()
	all := map[string]string{"": "", "root": token, "chat key": chatKey}
	for _, role := range principals.Roles() {
		_, all[role] = a.key(principals.User, principals.Role(role), 0, "*")
	}
	_, all["worker"] = a.key(principals.Service, principals.None, 0, "work:external:sum*")
	_, all["narrowed"] = a.key(principals.User, principals.Admin, 0, "runs:read")
	_, all["expired"] = a.key(principals.User, principals.Admin, time.Millisecond, "*")
	_, text := a.key(principals.User, principals.Admin, 0, "*")
	all["revoked"] = text
	_, err := principals.RevokeToken(a.t.Context(), a.pool, strings.Split(text, "_")[1], "a test")
	require.NoError(a.t, err)
	var name string
	name, all["disabled"] = a.key(principals.User, principals.Admin, 0, "*")
	_, err = principals.SetEnabled(a.t.Context(), a.pool, name, false, "a test")
	require.NoError(a.t, err)
	all["wrong secret"] = all["admin"][:len(all["admin"])-1]
	pgtest.Exec(a.t, a.pool, `select pg_sleep(0.01)`)
	return all
}

// TestEveryRouteForEveryRole reads the route table and sends each request as each caller.
func TestEveryRouteForEveryRole(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	callers := a.callers()
	tried := 0
	for path, methods := range a.doc["paths"].(map[string]any) {
		for method, described := range methods.(map[string]any) {
			method, op := strings.ToUpper(method), described.(map[string]any)
			at := strings.NewReplacer("{", "", "}", "").Replace(path)
			access, scopes, visitor := expectedAccess(method, at), []any{}, false
			if security := op["security"].([]any); len(security) > 0 {
				scopes, _ = security[0].(map[string]any)["principal"].([]any)
				_, visitor = security[0].(map[string]any)["visitor"]
			}
			assert.Truef(t, len(scopes) > 0 == (access == api.Admin) && visitor == (access == api.Visitor),
				"%s %s is documented for %v", method, path, op["security"])
			for who, secret := range callers {
				may := access == api.Public || access == api.Visitor && who == "chat key"
				for _, scope := range scopes {
					may = may || slices.Contains(strings.Fields(rights[scope.(string)]), who) ||
						who == "narrowed" && (scope == "runs:read" || scope == "authenticated")
				}
				w := a.raw(method, at, "{}", bearer(secret))
				want := "in"
				switch {
				case may:
				case slices.Contains([]string{"", "chat key", "expired", "revoked", "disabled", "wrong secret"}, who) ||
					len(scopes) == 0:
					want = "401"
				default:
					want = "403"
				}
				got := "in"
				if w.Code == 401 || w.Code == 403 || w.Code == 429 {
					got = strings.Replace(fmt.Sprint(w.Code), "429", "401", 1)
				}
				assert.Truef(t, got == want, "%s %s as %q: %d %s, want %s", method, path, who, w.Code, w.Body, want)
				assert.Truef(t, w.Code != http.StatusMethodNotAllowed && !strings.Contains(w.Body.String(), "no route"),
					"%s %s is documented and is not there: %d %s", method, path, w.Code, w.Body)
				assert.Truef(t, got != "403" || strings.Contains(w.Body.String(), fmt.Sprintf(`"scope":%q`, scopes[0])),
					"%s %s as %q does not name the scope: %s", method, path, who, w.Body)
				tried++
			}
		}
	}
	assert.Truef(t, tried >= 1000, "only %d requests", tried)
	used := slices.Sorted(maps.Keys(rights))
	assert.Truef(t, len(used) == 10, "scopes are %v", used)
}

// A worker reaches only executions of its flows.
func TestWorkerReachesOnlyItsFlows(t *testing.T) {
	t.Parallel()
	a := withEndpoints(t)
	_, worker := a.key(principals.Service, principals.None, 0, "work:external:sum*")
	start := func(flow string) (id, lock string) {
		var x struct{ ID string }
		a.create("/v1/threads", fmt.Sprintf(`{"id":%q}`, flow), nil)
		a.create("/v1/executions", fmt.Sprintf(`{"flow":%q,"thread_id":%q}`, flow, flow), &x)
		return x.ID, ""
	}
	send := func(method, path, body string) (int, string) {
		w := a.raw(method, path, body, bearer(worker))
		return w.Code, w.Body.String()
	}
	lockOf := func(id string) string {
		var l struct {
			LockID string `json:"lock_id"`
		}
		a.post("/v1/executions/"+id+"/lock", `{"owner":"w"}`, &l)
		return l.LockID
	}
	mine, _ := start("external:sum")
	foreign, _ := start("external:other")
	for id, want := range map[string]map[string]int{
		mine:    {"lock": 200, "beat": 200, "beats": 200, "checkpoint": 201, "message": 201, "claim": 200, "release": 200},
		foreign: {"lock": 403, "beat": 403, "beats": 403, "checkpoint": 403, "message": 403, "claim": 403, "release": 403},
	} {
		lock := lockOf(id)
		flow := map[bool]string{true: "external:sum", false: "external:other"}[id == mine]
		at := "/v1/executions/" + id
		for _, c := range []struct{ name, method, path, body string }{
			{"lock", "POST", at + "/lock", `{"owner":"w"}`},
			{"beat", "PUT", at + "/lock/" + lock, ""},
			{"beats", "PUT", "/v1/locks", fmt.Sprintf(`{"lock_ids":[%q]}`, lock)},
			{"checkpoint", "POST", at + "/checkpoints", fmt.Sprintf(`{"lock_id":%q,"step":"s","output":1}`, lock)},
			{
				"message", "POST", "/v1/threads/" + flow + "/messages",
				fmt.Sprintf(`{"content":"hi","execution_id":%q,"lock_id":%q}`, id, lock),
			},
			{"claim", "POST", "/v1/locks", fmt.Sprintf(`{"flows":[%q],"owner":"w2"}`, flow)},
			{"release", "POST", at + "/lock/" + lock, `{"status":"completed"}`},
		} {
			code, body := send(c.method, c.path, c.body)
			assert.Truef(t, code == want[c.name], "%s of %s: %d %s, want %d", c.name, flow, code, body, want[c.name])
			assert.Truef(t, code != 403 || strings.Contains(body, `"scope":"work:external:other"`), "%s: %s", c.name, body)
		}
	}
	upper := "/v1/executions/" + strings.ToUpper(foreign)
	code, body := send("POST", upper+"/checkpoints", `{"lock_id":"x","step":"s","output":1}`)
	assert.Equal(t, http.StatusForbidden, code, "an id in upper case", body)
	code, body = send("POST", "/v1/threads/external:sum/messages", `{"content":"as an admin"}`)
	assert.Equal(t, http.StatusForbidden, code, "a message outside an execution", body)
	pgtest.Equal(t, a.pool, "running", `select status from agent_executions where id::text = $1`, foreign)
}

// The scope operate cancels turns of its caller, not those of others, nor other executions.
func TestOperateCancelsOwnTurnsOnly(t *testing.T) {
	t.Parallel()
	a := start(t)
	name, secret := a.key(principals.User, principals.Admin, 0, "operate")
	_, other := a.key(principals.User, principals.Admin, 0, "operate")
	_, writer := a.key(principals.User, principals.Operator, 0, "runs:write")
	begun := func(flow string) string {
		id := pgtest.Value[string](t, a.pool, `insert into agent_executions (trace_id, surface, flow)
			values ('op_1', 'operate', $1) returning id::text`, flow)
		pgtest.Exec(t, a.pool, `insert into agent_links (cause, kind, effect)
			values ('principal ' || $1, 'asked', 'execution ' || $2)`, name, id)
		return "/v1/executions/" + id + "/cancel"
	}
	turn, flow := begun("operate"), begun("external")
	for _, c := range []struct {
		path, secret string
		code         int
	}{{turn, other, 403}, {flow, secret, 403}, {turn, secret, 200}, {flow, writer, 200}, {begun("operate"), writer, 200}} {
		w := a.raw("POST", c.path, `{"reason":"x"}`, bearer(c.secret))
		assert.Truef(t, w.Code == c.code, "%s: %d %s, want %d", c.path, w.Code, w.Body, c.code)
		assert.Truef(t, c.code != 403 || strings.Contains(w.Body.String(), `"scope":"runs:write"`), "%s", w.Body)
	}
}

// The rights of a worker are checked at each of its requests, so the check reads few executions.
func TestRightsOfWorkerUseIndexes(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	recorded, recorder := pgtest.Recorded(t, pool)
	a := newAgentWith(t, api.Options{Pool: recorded, Engine: engine(t, recorded)})
	_, worker := a.key(principals.Service, principals.None, 0, "work:external:sum*")
	for _, sql := range []string{
		`insert into agent_executions (trace_id, surface, flow) select 'fl_' || n, 'flow', 'f' from generate_series(1, 3000) n`,
		`analyze agent_executions`,
	} {
		pgtest.Exec(t, pool, sql)
	}
	a.raw("PUT", "/v1/locks", `{"lock_ids":["x"]}`, bearer(worker))
	checked := 0
	for _, q := range recorder.Queries() {
		if !strings.Contains(q.SQL, "select distinct x.flow") {
			continue
		}
		checked++
		plan, err := postgres.Values[string](t.Context(), pool, "explain", "explain "+q.SQL, q.Args...)
		require.NoError(t, err)
		assert.Truef(t, !strings.Contains(strings.Join(plan, "\n"), "Seq Scan on agent_executions"), "the plan is %s", plan)
	}
	assert.Equal(t, 1, checked, "checks of rights")
}
