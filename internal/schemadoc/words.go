package schemadoc

import (
	"fmt"
	"slices"
	"strings"
)

// plain are names of columns that say it all.
var plain = strings.Fields(`id name description created_at updated_at trace_id execution_id thread_id title reason
	skill_name skill_revision version revision error_message enabled url`)

// refersTo says what a column names where no foreign key does: by table and column, or by column alone.
var refersTo = map[string]string{
	"execution_id": "agent_executions", "lender": "agent_executions", "borrower": "agent_executions",
	"consumed_by": "agent_executions", "forked_from": "agent_executions",
	"thread_id": "agent_threads", "activity_id": "agent_activity", "cause_id": "agent_activity",
	"event_id": "agent_events", "skill_id": "agent_skills", "claimed_by": "agent_workers", "worker": "agent_workers",
	"agent_executions.parent_id": "agent_executions", "agent_activity.parent_id": "agent_activity",
	"agent_lock_waiters.lane": "agent_locks", "agent_lane_holds.lane": "agent_locks",
	"agent_approvals.skill_name": "agent_skills", "agent_mcp_tools.skill_name": "agent_skills",
	"agent_mcp_calls.skill_name": "agent_skills", "agent_automations.skill_name": "agent_skills",
	"agent_webhook_deliveries.endpoint": "agent_webhook_endpoints",
	"agent_prompts.tools":               "agent_prompt_parts", "agent_prompts.messages": "agent_prompt_parts",
}

// reference is a table that a column names.
type reference struct {
	columns []string
	target  string
	firm    bool // a foreign key
	text    string
}

// references are what the columns of a table name: foreign keys first, then by refersTo.
func (r *Relation) references() []reference {
	var all []reference
	var held []string
	for _, c := range r.Constraints {
		if c.Kind == "f" {
			all = append(all, reference{c.Columns, c.Target, true, c.Text})
			held = append(held, c.Columns...)
		}
	}
	for _, c := range r.Columns {
		target := refersTo[r.Name+"."+c.Name]
		if target == "" {
			target = refersTo[c.Name]
		}
		if target != "" && !slices.Contains(held, c.Name) {
			all = append(all, reference{columns: []string{c.Name}, target: target})
		}
	}
	return all
}

// key are the columns of the primary key.
func (r *Relation) key() []string {
	for _, c := range r.Constraints {
		if c.Kind == "p" {
			return c.Columns
		}
	}
	return nil
}

// Missing lists what has to have a comment and has none, and references to tables that are not there.
func Missing(nouns []*Noun) []string {
	var all []string
	need := func(comment, name string) {
		if comment == "" {
			all = append(all, name)
		}
	}
	tables := map[string]bool{}
	for _, n := range nouns {
		for _, r := range n.Tables {
			tables[r.Name] = true
		}
	}
	for _, n := range nouns {
		for _, r := range slices.Concat(n.Tables, n.Views, n.Types) {
			need(r.Comment, r.Name)
		}
		for _, r := range n.Tables {
			for _, c := range r.Columns {
				if !slices.Contains(plain, c.Name) {
					need(c.Comment, r.Name+"."+c.Name)
				}
			}
			for _, x := range r.Indexes {
				need(x.Comment, x.Name)
			}
			for _, f := range r.references() {
				if !tables[f.target] {
					all = append(all, fmt.Sprintf("%s in refersTo of %s", f.target, r.Name))
				}
			}
		}
		for _, f := range n.Calls {
			need(f.Comment, f.Name+"()")
		}
		for _, c := range n.Closed {
			need(c.Comment, c.Name)
		}
	}
	return all
}
