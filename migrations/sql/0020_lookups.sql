-- Indexes for what an admin looks up, so that a page of it costs the same whatever the table has grown to; and since when
-- a waiter waits.

-- Approvals by state, the latest first. One that is pending or approved is so until expires_at, which is therefore part of the
-- state; it is always as long after created_at, so its order is the order in which they were asked for.
create index agent_approvals_state on agent_approvals (status, expires_at, id);
-- The last arguments that somebody approved of a skill, to compare the next with.
create index agent_approvals_granted on agent_approvals (skill_name, id) where decided_at is not null and status <> 'rejected';

-- The runs of one automation, and those of them that are dead letters.
create index agent_automation_runs_history on agent_automation_runs (automation_id, id);
create index agent_automation_runs_given_up on agent_automation_runs (automation_id, id) where status = 'dead';

-- Deliveries of an endpoint in a state, and the settled ones, which agent_webhook_deliveries_open leaves out.
create index agent_webhook_deliveries_state on agent_webhook_deliveries (endpoint, status, id);
create index agent_webhook_deliveries_settled on agent_webhook_deliveries (status, id) where status in ('done', 'ignored');

alter table agent_lock_waiters add column since timestamptz not null default clock_timestamp();
comment on column agent_lock_waiters.since is 'When the waiter came; expires_at moves on while it waits.';
