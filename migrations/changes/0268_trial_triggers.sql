-- Evals: what a trial may insert into executions and the log is checked by the functions that check every row.
drop trigger if exists agent_executions_no_eval on agent_executions;
drop trigger if exists agent_activity_no_eval on agent_activity;
