package workspace

import (
	"context"
	"fmt"
	"slices"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// agentWarnings reports effects of changed agents that the changed fields do not show.
func agentWarnings(ctx context.Context, db postgres.DB, before []agents.Agent) ([]string, error) {
	after, err := (&agents.Directory{}).List(ctx, db)
	if err != nil {
		return nil, err
	}
	return keyWarnings(before, after), nil
}

// keyWarnings reports chat keys that no agent names any more. They reach the default agent.
func keyWarnings(before, after []agents.Agent) (warnings []string) {
	kept := keysOf(after)
	for _, key := range keysOf(before) {
		if !slices.Contains(kept, key) {
			warnings = append(warnings, fmt.Sprintf("no agent names the chat key %s any more; its visitors now reach %s", key,
				after[0].Name))
		}
	}
	return warnings
}

// keysOf lists the chat keys that agents name.
func keysOf(all []agents.Agent) (keys []string) {
	for _, a := range all {
		keys = append(keys, a.Keys...)
	}
	slices.Sort(keys)
	return slices.Compact(keys)
}
