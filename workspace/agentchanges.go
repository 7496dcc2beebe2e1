package workspace

import (
	"context"
	"fmt"
	"slices"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// agentWarnings reports effects of changed agents that the changed fields do not show.
func agentWarnings(ctx context.Context, db postgres.DB, before []agents.Agent) ([]string, error) {
	after, err := (&agents.Directory{}).List(ctx, db)
	if err != nil {
		return nil, err
	}
	warnings := keyWarnings(before, after)
	for _, check := range []func(ctx context.Context, db postgres.DB, before, after []agents.Agent) ([]string, error){
		threadWarnings, memoryWarnings, approvalWarnings,
	} {
		found, err := check(ctx, db, before, after)
		if err != nil {
			return nil, err
		}
		warnings = append(warnings, found...)
	}
	return warnings, nil
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

// recentThreads bounds the threads that threadWarnings reads.
const recentThreads = 10_000

// threadWarnings reports threads of visitors whose agent their chat key reached before, and does not reach any more. It
// reads the most recent threads.
func threadWarnings(ctx context.Context, db postgres.DB, before, after []agents.Agent) ([]string, error) {
	if slices.EqualFunc(before, after, func(a, b agents.Agent) bool {
		return a.Name == b.Name && a.Default == b.Default && slices.Equal(a.Keys, b.Keys)
	}) {
		return nil, nil
	}
	type group struct {
		Key, Agent string
		Threads    int64
	}
	groups, err := postgres.Rows[group](ctx, db, "count threads", `
		select t.owner as key, t.agent, count(*) as threads
		  from (select * from agent_threads order by updated_at desc, id desc limit @recent) t
		 where t.owner_kind in ('key', 'visitor') group by t.owner, t.agent order by t.owner, t.agent`,
		postgres.Strict{"recent": recentThreads})
	var warnings []string
	for _, g := range groups {
		if now := agents.Acting(after, g.Agent).Name; reaches(before, g.Key, g.Agent) && !reaches(after, g.Key, g.Agent) {
			warnings = append(warnings, fmt.Sprintf("%s of the chat key %s %s to agent %s, which the key no longer reaches; "+
				"their visitors get thread_agent until they start another thread", human.Counted(g.Threads, "recent thread"), g.Key,
				map[bool]string{true: "belongs", false: "belong"}[g.Threads == 1], now))
		}
	}
	return warnings, err
}

// reaches reports whether a chat key reaches the agent of a thread. The default agent answers threads of removed ones.
func reaches(all []agents.Agent, key, agent string) bool {
	acting := agents.Acting(all, agent)
	return slices.ContainsFunc(agents.ReachedBy(all, key), func(a agents.Agent) bool { return a.Name == acting.Name })
}

// memoryWarnings reports agents that had their own memory and have another one now.
func memoryWarnings(ctx context.Context, db postgres.DB, before, after []agents.Agent) (warnings []string, _ error) {
	for _, a := range after {
		if a.Memory == agents.MemoryOwn || agents.Acting(before, a.Name).Name != a.Name ||
			agents.Acting(before, a.Name).Memory != agents.MemoryOwn {
			continue
		}
		entries, err := postgres.Values[int64](ctx, db, "count memory", `
			select count(*) from agent_memory
			 where owner = @agent and (expires_at is null or expires_at > clock_timestamp())`,
			postgres.Strict{"agent": a.Name})
		if err != nil {
			return nil, err
		}
		if n := entries[0]; n > 0 {
			warnings = append(warnings, fmt.Sprintf("agent %s no longer reads its own memory (entries: %d); "+
				"it would with memory: own", a.Name, n))
		}
	}
	return warnings, nil
}

// approvalWarnings reports open approvals of agents that were removed, or that lost the skill. An approved call is made
// nevertheless.
func approvalWarnings(ctx context.Context, db postgres.DB, before, after []agents.Agent) ([]string, error) {
	type group struct {
		Agent, Skill string
		Approvals    int64
	}
	groups, err := postgres.Rows[group](ctx, db, "count approvals", `
		select coalesce(n.agent, x.agent) as agent, a.skill_name as skill, count(*) as approvals
		  from agent_approvals a
		  join agent_executions x on x.id = a.execution_id
		  left join agent_activity n on n.id = a.activity_id
		 where a.status in ('pending', 'approved') and a.expires_at > clock_timestamp() group by 1, 2 order by 1, 2`)
	var warnings []string
	for _, g := range groups {
		if may(before, g.Agent, g.Skill) && !may(after, g.Agent, g.Skill) {
			warnings = append(warnings, fmt.Sprintf("%s of agent %s for skill %s %s open; see agent approvals ls",
				human.Counted(g.Approvals, "open approval"), g.Agent, g.Skill,
				map[bool]string{true: "stays", false: "stay"}[g.Approvals == 1]))
		}
	}
	return warnings, err
}

// may reports whether an agent of the list may call a skill.
func may(all []agents.Agent, agent, skill string) bool {
	return slices.ContainsFunc(all, func(a agents.Agent) bool { return a.Name == agent && a.May(skill) })
}
