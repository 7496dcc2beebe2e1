package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	defaultMaxConns        = 16
	defaultApplicationName = "agent"
	connectTimeout         = 10 * time.Second
	connectRetryEvery      = 250 * time.Millisecond
	// A session that is idle in a transaction for so long is ended. A paused process keeps its locks no longer.
	idleInTransaction = time.Minute
	readCommitted     = "read committed"
	utf8              = "UTF8"
)

// Options tune [Open]; the zero value is right for a server process. What the connection string
// says (pool_max_conns, application_name, connect_timeout, default_query_exec_mode,
// idle_in_transaction_session_timeout, pool_ping_timeout, and what a session is asked to be like) wins.
type Options struct {
	MaxConns        int32         // most connections of the pool; 16 when 0
	ApplicationName string        // name shown in pg_stat_activity; "agent" when empty
	ConnectWait     time.Duration // how long to retry while the server cannot be reached or starts up; 0 tries once
	IdleTransaction time.Duration // how long a transaction may be left alone until the server ends it; a minute when 0
	// Reserve says how many of the most connections are left to pools of [Reserve]; nil for none.
	Reserve func(most int32) int32
}

// Open returns a pool for url (a URL or a key=value string) whose server has answered. The error
// says whether the server cannot be reached, refuses the user or has no such database, and what to
// do; it never contains the password. The caller closes the pool.
func Open(ctx context.Context, url string, opts Options) (*pgxpool.Pool, error) {
	config, err := parse(url, opts)
	if err != nil {
		return nil, err
	}
	route, err := probeWithin(ctx, config.ConnConfig, opts.ConnectWait)
	if err != nil {
		return nil, explain(config.ConnConfig, err)
	}
	if err := route.adapt(config.ConnConfig, url, cmp.Or(opts.IdleTransaction, idleInTransaction)); err != nil {
		return nil, err
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, explain(config.ConnConfig, err)
	}
	if g, ok := config.ConnConfig.Tracer.(guard); ok {
		g.moved.pool.Store(pool)
	}
	return pool, nil
}

// Reserve returns another pool to the database of pool, which was made by [Open], with at most n connections that
// nobody takes who has only that one. Where no pooler is in between, its statements wait for a lock for a second at
// most, unless they say otherwise, and fail with SQLSTATE 55P03 then. It opens no connection yet. The caller closes it.
func Reserve(ctx context.Context, pool *pgxpool.Pool, n int32) (*pgxpool.Pool, error) {
	config := pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = n, 0, 0
	g, ok := config.ConnConfig.Tracer.(guard)
	if ok {
		g.moved = &moved{}
		config.ConnConfig.Tracer = g
	}
	if _, given := config.ConnConfig.RuntimeParams["lock_timeout"]; ok && !g.pooled && !given {
		config.ConnConfig.RuntimeParams["lock_timeout"] = reservedLockTimeout
	}
	reserved, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, explain(config.ConnConfig, err)
	}
	if ok {
		g.moved.pool.Store(reserved)
	}
	return reserved, nil
}

// Dialer opens single connections to the database of pool, outside its limit: what [Listener] needs.
func Dialer(pool *pgxpool.Pool) func(ctx context.Context) (*pgx.Conn, error) {
	config := pool.Config().ConnConfig
	return func(ctx context.Context) (*pgx.Conn, error) {
		return pgx.ConnectConfig(ctx, config.Copy())
	}
}

// Pooled reports whether pool, made by [Open], ended at a connection pooler when it was opened: then LISTEN has no
// effect on its connections, and nothing may be kept in a session.
func Pooled(pool *pgxpool.Pool) bool {
	g, ok := pool.Config().ConnConfig.Tracer.(guard)
	return ok && g.pooled
}

// cutsPassword reports whether an @ stands behind the user information of a URL, which ends at the first @, as in
// libpq, or before a slash. Then a password had an @ or a slash in it, and errors would name a piece of it as the host
// or as the database.
func cutsPassword(url string) bool {
	scheme, rest, found := strings.Cut(url, "://")
	if !found || !strings.HasPrefix(scheme, "postgres") {
		return false
	}
	if end := strings.IndexAny(rest, "@/"); end >= 0 {
		rest = rest[end+1:]
	}
	rest, parameters, _ := strings.Cut(rest, "?")
	if strings.Contains(rest, "@") {
		return true
	}
	for parameter := range strings.SplitSeq(parameters, "&") {
		if !strings.Contains(parameter, "=") && strings.Contains(parameter, "@") {
			return true
		}
	}
	return false
}

func parse(url string, opts Options) (*pgxpool.Config, error) {
	if strings.TrimSpace(url) == "" {
		return nil,
			errors.New("open database: no connection string: set DATABASE_URL=postgres://user:password@host:5432/name")
	}
	config, err := pgxpool.ParseConfig(url)
	if err != nil || cutsPassword(url) {
		// The parser's own text can quote a piece of the password, so it is not passed on.
		return nil, errors.New("open database: cannot read the connection string: write " +
			"postgres://user:password@host:5432/name, " +
			"with special characters in the password percent-encoded (@ is %40, # is %23, / is %2F, ? is %3F)")
	}
	if !strings.Contains(url, "pool_max_conns") {
		config.MaxConns = defaultMaxConns
		if opts.MaxConns > 0 {
			config.MaxConns = opts.MaxConns
		}
	}
	if opts.Reserve != nil {
		config.MaxConns -= opts.Reserve(config.MaxConns)
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		name := opts.ApplicationName
		if name == "" {
			name = defaultApplicationName
		}
		config.ConnConfig.RuntimeParams["application_name"] = name
	}
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = connectTimeout
	}
	config.ConnConfig.DialFunc = newPatience().DialContext
	if config.PingTimeout == 0 {
		config.PingTimeout = answerWithin
	}
	config.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
		readTimes(conn)
		return nil
	}
	return config, nil
}

// route is what one connection told about the way to the server.
type route struct {
	pooled    bool   // another process than the announced one answers: a pooler is in between
	isolation string // the isolation level a statement gets when nobody asks
	encoding  string // of the database
}

// asked is what a session is to be like where no pooler is in between, whatever the server, the database and the role
// set: no just-in-time compilation, which costs short statements far more than it saves; times, spans and texts that
// are written, and read again, in one way alone; no end for being idle, which listening is.
var asked = map[string]string{
	"jit": "off", "timezone": "UTC", "datestyle": "ISO", "intervalstyle": "postgres", "client_encoding": utf8,
	"standard_conforming_strings": "on", "array_nulls": "on", "idle_session_timeout": "0",
}

// adapt makes config fit the way to the server. What a session is to be like is sent as startup parameters, of which
// PgBouncer refuses some, so they are only sent when no pooler is there.
func (r route) adapt(config *pgx.ConnConfig, url string, idle time.Duration) error {
	config.Tracer = guard{moved: &moved{}, refused: &refusals{}, pooled: r.pooled}
	if !strings.Contains(url, "default_query_exec_mode") {
		config.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
		if r.pooled {
			config.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		}
	}
	switch {
	case r.encoding != utf8:
		return &openError{
			target(config), fmt.Sprintf("its encoding is %q and must be %q", r.encoding, utf8),
			"make another with createdb --encoding=UTF8 --template=template0 agent, and name it in DATABASE_URL", nil,
		}
	case r.pooled && r.isolation != readCommitted:
		return fmt.Errorf("open database: its default isolation level is %q and must be %q: run alter database %s set "+
			"default_transaction_isolation = 'read committed'",
			r.isolation, readCommitted, pgx.Identifier{config.Database}.Sanitize())
	case r.pooled:
		return nil
	}
	given := make(map[string]bool)
	for name := range config.RuntimeParams {
		given[strings.ToLower(name)] = true
	}
	for name, value := range asked {
		if !given[name] {
			config.RuntimeParams[name] = value
		}
	}
	if !given["idle_in_transaction_session_timeout"] {
		config.RuntimeParams["idle_in_transaction_session_timeout"] = strconv.FormatInt(idle.Milliseconds(), 10)
	}
	config.RuntimeParams["default_transaction_isolation"] = readCommitted // also where the default is changed later
	return nil
}

func probeWithin(ctx context.Context, config *pgx.ConnConfig, wait time.Duration) (route, error) {
	deadline := time.Now().Add(wait)
	for {
		r, err := probe(ctx, config)
		if err == nil || !passing(err) || !time.Now().Before(deadline) {
			return r, err
		}
		select {
		case <-ctx.Done():
			return route{}, errors.Join(ctx.Err(), err)
		case <-time.After(connectRetryEvery):
		}
	}
}

func probe(ctx context.Context, config *pgx.ConnConfig) (r route, err error) {
	conn, err := pgx.ConnectConfig(ctx, config.Copy())
	if err != nil {
		return route{}, err
	}
	defer func() { err = errors.Join(err, conn.Close(context.WithoutCancel(ctx))) }()
	if r.pooled, err = pooled(ctx, conn); err != nil {
		return route{}, err
	}
	err = conn.QueryRow(ctx, "select current_setting('default_transaction_isolation'), current_setting('server_encoding')",
		pgx.QueryExecModeExec).
		Scan(&r.isolation, &r.encoding)
	return r, err
}

// pooled reports whether conn ends at a pooler: PgBouncer and its like announce a process id of
// their own making, not the one of the server process that answers.
func pooled(ctx context.Context, conn *pgx.Conn) (bool, error) {
	var pid uint32
	if err := conn.QueryRow(ctx, "select pg_backend_pid()::bigint", pgx.QueryExecModeExec).Scan(&pid); err != nil {
		return false, fmt.Errorf("read the server's process id: %w", err)
	}
	return pid != conn.PgConn().PID(), nil
}
