package automations_test

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// Whoever changes an automation and whoever changes its skill at the same time, the automation is in service exactly
// when its skill is.
func TestAnAutomationFollowsItsSkillThroughEveryRace(t *testing.T) {
	t.Parallel()
	const disable = `update agent_skills set enabled = false, disabled_by = 'self-heal', disabled_reason = 'it fails' where name = 'sizes'`
	for name, race := range map[string]struct{ before, first, second string }{
		"enabled while its skill is disabled": {
			`update agent_automations set enabled = false, disabled_by = 'admin' where name = 'a'`,
			`update agent_automations set enabled = true, disabled_by = '' where name = 'a'`, disable,
		},
		"given the skill while that is disabled": {
			`update agent_automations set skill_name = 'other' where name = 'a'`,
			`update agent_automations set skill_name = 'sizes' where name = 'a'`, disable,
		},
		"paused while its skill is enabled": {
			`update agent_automations set enabled = false, disabled_by = 'admin' where name = 'a';` + disable,
			`update agent_automations set enabled = true, disabled_by = '' where name = 'a'`,
			`update agent_skills set enabled = true, disabled_by = '' where name = 'sizes'`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool := pgtest.DB(t)
			exec(t, pool, `
				insert into agent_skills (name, tool_definition, handler) values ('sizes', '{}', 'builtin:x'), ('other', '{}', 'builtin:x')`)
			put(t, pool, automations.Definition{Name: "a"})
			if _, err := pool.Exec(t.Context(), race.before); err != nil {
				t.Fatal(err)
			}
			tx, err := pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), race.first); err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			go func() {
				_, err := pool.Exec(t.Context(), race.second)
				done <- err
			}()
			ended := false
			pgtest.Eventually(t, 20*time.Second, func() bool {
				select {
				case err := <-done:
					if ended = true; err != nil {
						t.Error(err)
					}
				default:
				}
				var waits bool
				err := pool.QueryRow(t.Context(), `
					select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`).Scan(&waits)
				if err != nil {
					t.Fatal(err)
				}
				return waits || ended
			}, "the second waits for the first, or has passed it")
			if err := tx.Commit(t.Context()); err != nil {
				t.Fatal(err)
			}
			if !ended {
				if err := <-done; err != nil {
					t.Fatal(err)
				}
			}
			var skill bool
			if err := pool.QueryRow(t.Context(), `select enabled from agent_skills where name = 'sizes'`).Scan(&skill); err != nil {
				t.Fatal(err)
			}
			if a := get(t, pool, "a"); a.Enabled != skill {
				t.Errorf("its skill is enabled: %t, the automation: %t, paused for %q", skill, a.Enabled, a.PausedFor)
			}
		})
	}
}
