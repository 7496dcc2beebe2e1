-- Named databases: what sql: skills may query and change beside the agent's own.

create table agent_databases (
  name        text primary key check (name ~ '^[a-zA-Z][a-zA-Z0-9_-]{0,63}$'),
  description text not null default '',
  url_env     text not null check (url_env ~ '^[A-Za-z_][A-Za-z0-9_]{0,127}$'),
  access      text not null default 'read' check (access in ('read', 'write')),
  role        text not null default '',
  source      text not null default 'workspace',
  created_at  timestamptz not null default clock_timestamp(),
  updated_at  timestamptz not null default clock_timestamp()
);
comment on table agent_databases is
  'Databases beside the own one that sql: skills use. Their URLs, which are secrets, are in the environment.';
comment on column agent_databases.url_env is 'The environment variable that has the URL.';
comment on column agent_databases.access is
  'read: every call is a read-only transaction. write: skills with config.writes may change it.';
comment on column agent_databases.role is 'The role that queries run as (set local role); empty for that of the URL.';

-- A call that was refused because a setting is missing says nothing about its skill.
create or replace view agent_skill_calls as
  select a.id, a.skill_name, a.status, a.error_class, a.error_message, a.duration_ms, a.trace_id, a.created_at
    from agent_activity a
   where a.kind = 'call' and a.status in ('success', 'error')
     and a.error_class not in ('invalid_params', 'unknown_tool', 'denied', 'stale', 'cancelled', 'interrupted', 'stall',
                               'disabled', 'on_trial', 'yielded', 'budget', 'configuration');

create or replace view agent_activity_measured as
  select a.id, a.skill_name, a.created_at, a.status,
         date_trunc('hour', a.created_at at time zone 'UTC') at time zone 'UTC' as hour, a.kind,
         agent_count_key(case a.kind
           when 'model' then coalesce(nullif(a.purpose, ''), a.skill_name) else a.skill_name end) as skill,
         agent_count_key(a.surface) as surface, agent_count_key(a.model) as model,
         a.kind = 'call' and a.status in ('success', 'error')
           and a.error_class not in ('invalid_params', 'unknown_tool', 'denied', 'stale', 'cancelled',
                                     'interrupted', 'stall', 'disabled', 'on_trial', 'yielded', 'budget',
                                     'configuration') as telling,
         case a.kind when 'model'
           then agent_count_tokens(a.token_usage ->> 'prompt_tokens') else 0 end as prompt_tokens,
         case a.kind when 'model'
           then agent_count_tokens(a.token_usage ->> 'completion_tokens') else 0 end as completion_tokens,
         case a.kind when 'model' then agent_count_tokens(a.token_usage ->> 'total_tokens') else 0 end as tokens,
         case when a.kind = 'model' and a.cost_usd <> 'NaN' then a.cost_usd else 0 end as cost_usd,
         case when a.duration_ms is not null then greatest(0, least(a.duration_ms, 1000000000000)) end as duration_ms,
         a.trace_id, a.led_to,
         case a.kind when 'model'
           then least(agent_tokens(a.token_usage, 'unknown_tokens'), 1000000000000) else 0 end as unknown_tokens,
         case a.kind when 'model' then agent_usd(a.token_usage, 'unknown_usd') else 0 end as unknown_usd
    from agent_activity a;

