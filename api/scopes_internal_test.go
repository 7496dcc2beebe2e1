package api

import (
	"net/http"
	"reflect"
	"slices"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A retry after a lost response would create a second token, which nobody has seen.
func TestRoutesThatCreateTokensAreNotRetried(t *testing.T) {
	t.Parallel()
	table, err := (&server{}).routes(nil)
	require.NoError(t, err)
	var checked int
	for _, rt := range table {
		response := reflect.TypeOf(rt.response)
		if rt.method != http.MethodPost || response == nil || response.Kind() != reflect.Struct {
			continue
		}
		for _, field := range reflect.VisibleFields(response) {
			if field.Tag.Get("json") == "token" {
				checked++
				assert.Truef(t, !rt.safeToRetry, "%s %s is retried", rt.method, rt.path)
				assert.Truef(t, rt.secret != "", "the response of %s %s is stored", rt.method, rt.path)
			}
		}
	}
	assert.Equal(t, 2, checked, "routes that create tokens")
}

// A route without a scope is open to admins only. The route table must state that.
func TestEveryRouteHasAScope(t *testing.T) {
	t.Parallel()
	table, err := (&server{}).routes(nil)
	require.NoError(t, err)
	known := map[string]bool{}
	for _, rt := range table {
		name := rt.method + " " + rt.path
		known[name] = true
		assert.Truef(t, rt.access != Admin || len(scopesByRoute[name]) > 0, "%s has no scope: add it to scopes.go", name)
		assert.Truef(t, rt.access == Admin || len(scopesByRoute[name]) == 0, "%s has a scope and does not check it", name)
	}
	for scope, names := range routesByScope {
		for _, name := range names {
			assert.Truef(t, known[name], "%s, of scope %s, is no route", name, scope)
		}
		assert.Truef(t, slices.Equal(names, slices.Compact(slices.Clone(names))), "scope %s names a route twice", scope)
	}
}
