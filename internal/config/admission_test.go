package config_test

import (
	"slices"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/config"
)

func TestLimitsOfRuns(t *testing.T) {
	t.Parallel()
	got := load(t, map[string]string{"AGENT_LIMITS": "flow:external:x=5, surface:webhook=0,"}).Admission
	if want := []config.Admission{
		{Kind: "flow", Name: "external:x", Running: 5}, {Kind: "surface", Name: "webhook", Running: 0},
	}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	for _, bad := range []string{"flow:a", "flow=1", "flow:=1", "a=1", "flow:a=-1", "flow:a=1.5", "surface:nowhere=1", "flow:a=1,flow:a=2"} {
		if _, err := config.Load(map[string]string{"AGENT_LIMITS": bad}); err == nil {
			t.Errorf("%s is taken", bad)
		}
	}
}
