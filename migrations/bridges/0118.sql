-- Brings a database of schema version 118 to the baseline, and keeps its rows. The code is applied afterwards. This file
-- first drops the old code by name, and touches no other objects.

-- Processes of version 118 have runs under way, and some of their writes call no function. Void their claims, as when a
-- process is lost, so the database refuses these writes. Lock the tables first, so no transaction waits for a row
-- meanwhile.
lock table agent_workers, agent_executions, agent_locks in access exclusive mode;
update agent_workers set expires_at = 'epoch' where kind = 'process';
update agent_locks l
   set fencing_token = agent_lock_token(l.fencing_token, clock_timestamp()), expires_at = least(l.expires_at, clock_timestamp())
 where not l.parked and l.locked_by <> ''
   and l.execution_id in (select x.id from agent_executions x where x.status = 'running' and not x.outside);
update agent_executions x set claim = x.claim + 1000000 where x.status = 'running' and not x.outside;
do $$
declare
  was constant text := 'acquire_agent_lock acquire_many_agent_locks agent_activity_late agent_activity_needed agent_activity_retirable
agent_approvals_fixed agent_attended agent_audit_object agent_autonomous_paused agent_bucket_duration
agent_cancel_line agent_cause agent_cause_of_event agent_cause_of_execution agent_cause_of_run agent_charges
agent_checkpoints_fence agent_child_outcome agent_count_key agent_count_tokens agent_duration_bucket
agent_event_id_class agent_event_id_slot agent_event_kind agent_events_consumed agent_events_lock_id
agent_events_start_automations agent_executions_changed agent_executions_outside agent_executions_valid
agent_failing_skills_since agent_flow_may_join agent_fork_cut agent_fork_steps agent_free_places agent_from_automation
agent_is_held_back agent_lane_freed agent_lane_open agent_last_sent agent_lenders agent_lends agent_limits_changed
agent_lock_blockers agent_lock_check agent_lock_claim agent_lock_execution agent_lock_fits agent_lock_head
agent_lock_parks agent_lock_token agent_lock_wanted agent_memory_began agent_memory_begin agent_memory_end
agent_memory_nearest agent_memory_owned_revision agent_memory_revise agent_memory_revision agent_name_fault
agent_next_in_line agent_objective_evidence_check agent_objective_progressed agent_objective_steps_check
agent_objectives_edited agent_patience agent_pause_check agent_queued_message agent_readable_documents
agent_ready_kinds agent_request_outcome agent_retention_before agent_revise agent_revise_state agent_skill_figures
agent_skill_figures_since agent_skill_streak agent_skills_changed agent_slowest_key agent_slowest_skills_since
agent_speaks_for agent_status_changed agent_thread_busy agent_thread_for agent_thread_had_flows agent_thread_id
agent_thread_idle agent_thread_is_of agent_thread_lane agent_thread_listener agent_thread_next agent_thread_own
agent_tokens agent_trace_forms agent_trace_id agent_usd agent_uuid agent_uuid7 agent_uuid7_floor agent_vector_version
agent_wait_event agent_wait_lock agent_wait_longest agent_wait_standard agent_webhook_wanted agent_why_because
agent_why_effects agent_why_lanes agent_why_log agent_why_lost agent_why_runs agent_why_waits agent_with_free_lanes
agent_words amend_agent_prompt answer_agent_request ask_agent_lock await_agent_lock beat_agent_locks
begin_agent_executions borrow_agent_lock break_agent_lock cancel_agent_execution check_agent_delivery
check_agent_event checkpoint_agent_execution claim_agent_execution claim_agent_executions clean_agent_threads
close_agent_activity close_agent_approvals close_agent_executions close_agent_requests close_agent_webhook
complete_agent_cancel count_agent_activity cover_agent_activity decide_agent_approval deliver_agent_event
drop_agent_activity_partition emit_agent_approval emit_agent_execution_end emit_agent_objective emit_agent_skill
emit_agent_webhook emit_agent_webhook_dead end_agent_executions ensure_agent_activity_partitions expire_agent_locks
fence_agent_execution fence_agent_lock finish_agent_execution finish_agent_executions flush_agent_thread
flush_agent_threads fork_agent_execution free_agent_lock free_agent_locks free_agent_worker_lanes
free_many_agent_locks give_up_agent_claim hand_agent_event hand_agent_events hand_agent_lock hand_over_agent_event
is_agent_evidence is_agent_lock_held join_agent_thread leave_agent_lock_queue lend_agent_lock let_into_agent_thread
link_agent_wakes lock_agent_children lock_agent_document_request lock_agent_execution lock_agent_line
lock_agent_lock_row lock_agent_locks lock_agent_thread lose_agent_claim lose_agent_claims note_agent_claim
note_agent_hold note_agent_status old_agent_activity old_agent_approvals old_agent_automation_runs old_agent_budgets
old_agent_deliveries old_agent_events old_agent_executions old_agent_outbox old_agent_prompts old_agent_rows
old_agent_threads open_agent_thread open_agent_thread_for_flow park_agent_execution park_agent_executions
park_agent_locks pass_agent_lock pause_agent pause_agent_automation pause_agent_automations place_agent_message
prune_agent prune_agent_all prune_agent_budgets prune_agent_causes prune_agent_executions
prune_agent_executions_at_once prune_agent_leftovers prune_agent_prompt_parts prune_agent_prompts prune_agent_thread
put_off_agent_objective queue_for_agent_lock quit_agent_lock_queue raise_agent_event ready_agent_executions
recall_agent_loans recall_agent_thread receive_agent_message record_agent_prompt record_agent_steps
record_stale_agent_write recover_agent_activity recover_agent_claim refuse_while_paused release_agent_lock
release_agent_locks release_many_agent_locks renew_agent_lock renew_agent_locks renew_agent_worker reown_agent_locks
request_agent_cancel reserve_agent_budget resume_agent resume_agent_execution resume_agent_execution_for
resume_agent_executions retire_agent_activity_partition return_agent_lock send_agent_message set_agent_limits
set_agent_retention settle_agent_budget settle_agent_budgets settle_agent_message start_agent_executions
sweep_agent_executions sweep_agent_locks take_agent_document take_agent_executions take_agent_lock take_agent_thread
tell_agent_parents try_acquire_agent_lock uncounted_agent_activity uncounted_agent_charges unlock_agent_execution
use_agent_approval void_agent_approvals void_agent_leases wake_agent_parents why withdraw_agent_messages
write_off_agent_budget';
  x record;
begin
  for x in select t.tgname, t.tgrelid::regclass as tab from pg_trigger t join pg_class c on c.oid = t.tgrelid
            where c.relnamespace = to_regnamespace(current_schema()) and c.relname ~ '^agent_' and not t.tgisinternal and t.tgparentid = 0 loop
    execute format('drop trigger %I on %s', x.tgname, x.tab);
  end loop;
  execute (select 'drop view ' || string_agg(c.oid::regclass::text, ', ') from pg_class c
            where c.relnamespace = to_regnamespace(current_schema()) and c.relkind = 'v' and c.relname ~ '^agent_');
  for x in select p.oid::regprocedure as name, p.prokind from pg_proc p
            where p.pronamespace = to_regnamespace(current_schema()) and p.proname = any (string_to_array(translate(was, e'\n', ' '), ' ')) loop
    begin
      execute format('drop %s %s', case x.prokind when 'p' then 'procedure' else 'function' end, x.name);
    exception when dependent_objects_still_exist then
      null;                                                  -- the default of a column calls it
    end;
  end loop;
end $$;

alter function agent_uuid7(timestamptz) set schema lanekeeper;
alter function agent_uuid7_floor(timestamptz) set schema lanekeeper;

alter table agent_executions
  alter column surface type agent_surface,
  alter column queue type agent_queue,
  alter column priority type agent_priority,
  alter column status type agent_execution_status,
  alter column waiting_for type agent_wait_kind,
  alter column max_attempts type agent_positive,
  alter column on_lost type agent_on_lost,
  alter column progress_seconds type agent_seconds,
  alter column result_type type agent_result_type;

alter table agent_threads validate constraint agent_threads_owner_kind;
create index agent_documents_own on agent_documents (owner_kind, owner, visitor, id);

-- Retention is in Go now.
drop procedure if exists prune_agent_all(int);
drop function if exists prune_agent(text, int, boolean), old_agent_rows(text, interval, timestamptz, text, int),
  old_agent_activity(timestamptz, uuid, int), old_agent_executions(timestamptz, uuid, int), old_agent_events(timestamptz, interval, uuid, int),
  old_agent_approvals(timestamptz, uuid, int), old_agent_automation_runs(timestamptz, uuid, int), old_agent_deliveries(timestamptz, uuid, int),
  old_agent_outbox(timestamptz, uuid, int), old_agent_prompts(timestamptz, uuid, int),
  old_agent_threads(timestamptz, timestamptz, text, int), old_agent_budgets(timestamptz, timestamptz, text, int),
  agent_retention_before(text, interval), prune_agent_budgets(interval), prune_agent_causes(text, uuid[]), prune_agent_executions(uuid[]),
  prune_agent_executions_at_once(uuid[]), prune_agent_leftovers(int), prune_agent_thread(text, timestamptz, int),
  prune_agent_prompts(uuid[]), prune_agent_prompt_parts(int), agent_activity_needed(text, uuid, uuid), agent_activity_retirable(),
  retire_agent_activity_partition(text), drop_agent_activity_partition(text);
drop type if exists agent_old_rows;

-- Rename columns and tables.
alter table agent_executions rename column outside to is_external;
alter index agent_executions_outside rename to agent_executions_external;
alter table agent_lock_waiters rename column handed_seconds to handover_ttl_seconds;
alter table agent_automations rename column armed to signal_armed;
alter table agent_activity_counted rename column looked to checked_upto;
alter table agent_retention rename column least to min_keep;
alter table agent_retention rename constraint agent_retention_least_check to agent_retention_min_keep_check;
alter table agent_untold_ends rename to agent_unpublished_completions;
alter index agent_untold_ends_pkey rename to agent_unpublished_completions_pkey;

-- Add the new parts of existing tables. The schema text then creates new tables and indexes.
alter table agent_workers add column go_flows text[] not null default '{}';
alter table agent_threads add column title text not null default '';
alter table agent_checkpoints add column waits jsonb;
alter table agent_activity_counts add column cached_tokens bigint not null default 0;
alter table agent_cancel_requests add column actor jsonb not null default '{}';
alter table agent_skills add column four_eyes boolean not null default false;
alter table agent_approvals
  add column decided_token_id text not null default '', add column decided_via text not null default '',
  add column decided_message text not null default '', add column four_eyes boolean not null default false,
  add column requested_by text[] not null default '{}';
alter table agent_webhook_targets
  add column format text not null default '' check (format in ('', 'slack')),
  drop constraint agent_webhook_targets_secrets_check,
  add constraint agent_webhook_targets_secrets_check check (cardinality(secrets) > 0 or format = 'slack');
alter table agent_links
  drop constraint agent_links_kind_check,
  add constraint agent_links_kind_check check (kind in ('raised', 'woke', 'started', 'ran', 'told', 'allowed', 'asked'));
alter table agent_retention drop constraint agent_retention_kind_check;
drop table agent_logouts;
