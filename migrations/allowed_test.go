package migrations_test

// early is the reason of the files up to 0021: processes are stopped for upgrades from versions before it, so none of
// them ran while these were applied (docs/upgrading.md).
const early = "upgrades while processes serve begin with schema version 21"

// unreleased is the reason of a key that had to change: no release has the table's old one.
const unreleased = "nothing was released with the key that was; a category has at most 5,000 entries (docs/upgrading.md)"

// allowed lists what files do against the rule of docs/upgrading.md, each with the reason why nobody minds: the release
// since which nothing uses what goes, or why what is locked is small.
var allowed = map[string]map[string]string{
	"0006_threads.sql": {
		"builds index agent_executions_thread on agent_executions": early,
	},
	"0012_outbox.sql": {
		"builds index agent_locks_threads on agent_locks":              early,
		"builds index agent_messages_dedupe on agent_messages":         early,
		"builds index agent_messages_due on agent_messages":            early,
		"builds index agent_messages_queued on agent_messages":         early,
		"builds index agent_messages_sending on agent_messages":        early,
		"constraint agent_threads_idle_seconds_check on agent_threads": early,
	},
	"0013_waits.sql": {
		"builds index agent_executions_forks on agent_executions": early,
		"drops function agent_last_message(uuid)":                 early,
	},
	"0014_outside.sql": {
		"builds index agent_executions_outside on agent_executions":  early,
		"builds index agent_executions_places on agent_executions":   early,
		"builds index agent_executions_progress on agent_executions": early,
		"builds index agent_workers_lock_id_key on agent_workers":    early,
		"constraint agent_workers_lock_id_key on agent_workers":      early,
		"rewrites agent_executions":                                  early,
	},
	"0015_flows.sql": {
		"constraint agent_automations_action on agent_automations": early,
	},
	"0016_changes.sql": {
		"builds index agent_executions_waits on agent_executions": early,
	},
	"0020_lookups.sql": {
		"builds index agent_approvals_granted on agent_approvals":                   early,
		"builds index agent_approvals_state on agent_approvals":                     early,
		"builds index agent_automation_runs_given_up on agent_automation_runs":      early,
		"builds index agent_automation_runs_history on agent_automation_runs":       early,
		"builds index agent_webhook_deliveries_settled on agent_webhook_deliveries": early,
		"builds index agent_webhook_deliveries_state on agent_webhook_deliveries":   early,
		"rewrites agent_lock_waiters":                                               early,
	},
	"0021_panels.sql": {
		"builds index agent_memory_key on agent_memory":            early,
		"builds index agent_messages_failed on agent_messages":     early,
		"builds index agent_objectives_status on agent_objectives": early,
	},
	"0052_paused.sql": {
		"writes all rows of agent_automations": "only those whose skill is disabled, of a table of some dozens of rows",
	},
	"0058_thread_owners.sql": {
		"constraint agent_threads_owner_kind on agent_threads": "not validated, so no row is looked at; the release before writes the default",
	},
	"0062_reports.sql": {
		"inserts what it reads into agent_activity_counts": "the sums of the hours and days so far, once more: thousands of rows, under the lock of the counting pass",
	},
	"0097_memory_owner.sql": {
		"builds index agent_memory_category on agent_memory":                      unreleased,
		"builds index agent_memory_forgotten_owner_key on agent_memory_forgotten": unreleased,
		"builds index agent_memory_owner_key on agent_memory":                     unreleased,
		"constraint agent_memory_owner_key on agent_memory":                       unreleased,
	},
	"0100_prompts.sql": {
		"constraint agent_retention_kind_check on agent_retention": "one kind more, of a table of a dozen rows",
	},
	"0116_given_documents.sql": {
		"builds index agent_documents_free on agent_documents": "the table is as new as the index: no release has it",
	},
}
