-- Decisions: who decided, with which token, and by which way; four eyes; who asked.
alter table agent_approvals add column if not exists decided_token_id text not null default '',
  add column if not exists decided_via text not null default '', add column if not exists decided_message text not null default '',
  add column if not exists four_eyes boolean not null default false,
  add column if not exists requested_by text[] not null default '{}';
comment on column agent_approvals.decided_token_id is 'The API token of the decision. Empty: a session, AGENT_ADMIN_TOKEN, or no API.';
comment on column agent_approvals.decided_via is 'How the decision came: page, http, cli, slack, telegram, or sql.';
comment on column agent_approvals.decided_message is 'The message with the button, in the words of the provider. Empty: no button.';
comment on column agent_approvals.four_eyes is 'Principals of requested_by cannot decide. Only root and SQL may.';
comment on column agent_approvals.requested_by is 'The principals that asked for the execution, as far as they are known.';
create trigger agent_approvals_eyes before update of four_eyes on agent_approvals for each row
  when (old.four_eyes is distinct from new.four_eyes) execute function lanekeeper.agent_approvals_check();

alter table agent_skills add column if not exists four_eyes boolean not null default false;
comment on column agent_skills.four_eyes is 'Who asked for a call cannot approve it. It needs trust approve.';

alter table agent_cancel_requests add column if not exists actor jsonb not null default '{}';
comment on column agent_cancel_requests.actor is 'The principal, token and way of the request, for the audit.';

alter table agent_links drop constraint if exists agent_links_kind_check;
alter table agent_links add constraint agent_links_kind_check
  check (kind in ('raised', 'woke', 'started', 'ran', 'told', 'allowed', 'asked')) not valid;
comment on column agent_links.cause is 'A reference as why returns it: execution ID, trace ID, event ID, approval ID; or principal NAME.';
comment on column agent_links.kind is
  'The relation: the cause raised, woke, started, ran, told, allowed or asked for the effect.';
