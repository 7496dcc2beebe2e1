package api

import (
	"slices"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

// A route without a scope is open to admins only. It has to be said, not forgotten.
func TestEveryRouteHasAScope(t *testing.T) {
	t.Parallel()
	table, err := (&server{}).routes(nil)
	require.NoError(t, err)
	known := map[string]bool{}
	for _, rt := range table {
		name := rt.method + " " + rt.path
		known[name] = true
		if rt.access == Admin && len(scopes[name]) == 0 {
			t.Errorf("%s has no scope: add it to scopes.go", name)
		}
		if rt.access != Admin && len(scopes[name]) > 0 {
			t.Errorf("%s has a scope and does not check it", name)
		}
	}
	for scope, names := range routesByScope {
		for _, name := range names {
			if !known[name] {
				t.Errorf("%s, of scope %s, is no route", name, scope)
			}
		}
		if !slices.Equal(names, slices.Compact(slices.Clone(names))) {
			t.Errorf("scope %s names a route twice", scope)
		}
	}
}
