// Package wrong has statements that do not fit the schema.
package wrong

import "context"

const columns = `id, colour`

type db interface {
	Exec(ctx context.Context, sql string, args ...any)
	Queue(sql string, args ...any)
}

func wrong(ctx context.Context, d db, table string, own func(sql string)) {
	d.Exec(ctx, `select `+columns+` from agent_executions where id = @id`, nil)
	d.Exec(ctx, `insert into agent_workers (ttl_seconds, expires_at) values (@ttl, now() + make_interval(secs => @ttl))`,
		nil)
	d.Queue(`delete from agent_nothing where id = @id`, nil)
	d.Exec(ctx, `select count(*) from `+table)
	d.Exec(ctx, `select id from agent_executions where id = @id`, nil)
	own(`select size from agent_locks`)
}
