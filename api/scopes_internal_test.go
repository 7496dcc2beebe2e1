package api

import (
	"slices"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

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
