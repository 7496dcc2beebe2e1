package app

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/config"
)

// A run of evals is resumed, and passes a gate, only with the settings of its model calls.
func TestModelSetupDependsOnSettingsOfCalls(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, p := range []config.Provider{
		{}, {HeadersJSON: `{"a":"b"}`}, {QueryJSON: `{"a":"b"}`}, {ExtraJSON: `{"a":"b"}`}, {ExtraJSON: `{"a":"c"}`},
	} {
		setup := modelSetup(config.Config{Provider: p})
		assert.Truef(t, !seen[setup], "%+v has the setup of other settings", p)
		seen[setup] = true
	}
}
