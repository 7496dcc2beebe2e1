-- Each agent has a heartbeat, objectives and automations of its own.

alter table agent_schedules add column agent text not null default '';
comment on column agent_schedules.agent is 'Who acts in the executions that it starts. Empty: the default agent.';

alter table agent_objectives add column agent text not null default '';
comment on column agent_objectives.agent is 'The agent whose heartbeat works on it. Empty: the default agent.';

alter table agent_automations add column agent text not null default '';
comment on column agent_automations.agent is 'The agent that acts in its runs. Empty: the default agent.';
