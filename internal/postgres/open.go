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
	// The server ends a session that is idle in a transaction for idleInTransaction. So a paused process loses its locks.
	idleInTransaction = time.Minute
	readCommitted     = "read committed"
	utf8              = "UTF8"
)

// Options configure [Open]. The zero value suits a server process. The connection string overrides them, and all
// session parameters except default_transaction_isolation.
type Options struct {
	MaxConns        int32         // maximum size of the pool; default 16
	ApplicationName string        // shown in pg_stat_activity; default "agent"
	ConnectWait     time.Duration // time to retry an unreachable or starting server; 0 tries once
	IdleTransaction time.Duration // idle_in_transaction_session_timeout; default 1 minute
	// Reserve returns the part of maxConns that pools made by [Reserve] get. Nil reserves none.
	Reserve func(maxConns int32) int32
}

// Open connects once and returns a pool for url, a URL or a key=value string. The error names the cause (unreachable
// server, rejected user, missing database) and a remedy, never the password. The caller closes the pool.
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
		g.resetter.pool.Store(pool)
	}
	return pool, nil
}

// Reserve returns a second pool, of at most n connections, to the database of pool. Users of pool cannot exhaust the
// second pool. Without a pooler its lock_timeout is one second (SQLSTATE 55P03), unless the connection string sets it.
// It connects lazily. The caller closes it.
func Reserve(ctx context.Context, pool *pgxpool.Pool, n int32) (*pgxpool.Pool, error) {
	config := pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = n, 0, 0
	g, ok := config.ConnConfig.Tracer.(guard)
	if ok {
		g.resetter = &failoverResetter{}
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
		g.resetter.pool.Store(reserved)
	}
	return reserved, nil
}

// Dialer returns a function that opens connections to the database of pool, outside the pool's limit. [Listener] needs
// such a function.
func Dialer(pool *pgxpool.Pool) func(ctx context.Context) (*pgx.Conn, error) {
	config := pool.Config().ConnConfig
	return func(ctx context.Context) (*pgx.Conn, error) {
		return pgx.ConnectConfig(ctx, config.Copy())
	}
}

// Pooled reports whether pool, made by [Open], goes through a connection pooler. LISTEN and session state do not work
// there.
func Pooled(pool *pgxpool.Pool) bool {
	g, ok := pool.Config().ConnConfig.Tracer.(guard)
	return ok && g.pooled
}

// hasUnescapedPassword reports whether the password of a URL contains an unescaped @ or slash. The parser would read
// the rest of the password as the host or the database, and errors would print it.
func hasUnescapedPassword(url string) bool {
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

// parse parses a connection string and applies the options.
func parse(url string, opts Options) (*pgxpool.Config, error) {
	if strings.TrimSpace(url) == "" {
		return nil,
			errors.New("open database: no connection string: set DATABASE_URL=postgres://user:password@host:5432/name")
	}
	config, err := pgxpool.ParseConfig(url)
	if err != nil && !hasUnescapedPassword(url) {
		if problem := unusable(err); problem != "" {
			return nil, errors.New("open database: " + problem + ": correct or remove it in DATABASE_URL")
		}
	}
	if err != nil || hasUnescapedPassword(url) {
		// The parser's error can quote part of the password, so Open drops the error.
		return nil, errors.New("open database: cannot read the connection string: write " +
			"postgres://user:password@host:5432/name, " +
			"with special characters in the password percent-encoded (@ is %40, # is %23, / is %2F, ? is %3F), " +
			"and behind the ? only values that a parameter takes (pool_max_conns from 1, sslmode=require)")
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
		config.ConnConfig.RuntimeParams["application_name"] = cmp.Or(opts.ApplicationName, defaultApplicationName)
	}
	config.ConnConfig.ConnectTimeout = cmp.Or(config.ConnConfig.ConnectTimeout, connectTimeout)
	config.ConnConfig.DialFunc = newLivenessProber().DialContext
	config.PingTimeout = cmp.Or(config.PingTimeout, probeTimeout)
	config.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
		readTimes(conn)
		return nil
	}
	return config, nil
}

// route describes the path to the server, as seen by one probe.
type route struct {
	pooled    bool   // through a connection pooler
	isolation string // default_transaction_isolation
	encoding  string // server_encoding
}

// trackedDefaults are the session parameters of every connection. PgBouncer keeps these for each client.
var trackedDefaults = map[string]string{
	"timezone": "UTC", "datestyle": "ISO", "client_encoding": utf8, "standard_conforming_strings": "on",
}

// sessionDefaults are the further session parameters of connections without a pooler. JIT costs short statements more
// than it saves. Fixed formats parse the same under every server setting. LISTEN needs idle_session_timeout off.
var sessionDefaults = map[string]string{
	"jit": "off", "intervalstyle": "postgres", "array_nulls": "on", "idle_session_timeout": "0",
}

// adapt configures the session for the route. PgBouncer rejects startup parameters that it does not track, so adapt
// sends those only without a pooler.
func (r route) adapt(config *pgx.ConnConfig, url string, idle time.Duration) error {
	config.Tracer = guard{resetter: &failoverResetter{}, refused: &refusals{}, pooled: r.pooled}
	if !strings.Contains(url, "default_query_exec_mode") {
		config.DefaultQueryExecMode = pgx.QueryExecModeCacheStatement
		if r.pooled {
			config.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		}
	}
	switch {
	case r.encoding != utf8:
		return &openError{
			target: target(config), what: fmt.Sprintf("database encoding is %q, must be %q", r.encoding, utf8),
			todo: "create a database with createdb --encoding=UTF8 --template=template0 agent and set DATABASE_URL to it",
		}
	case r.pooled && r.isolation != readCommitted:
		return &openError{
			target: target(config),
			what:   fmt.Sprintf("default isolation level is %q, must be %q", r.isolation, readCommitted),
			todo: "run alter database " + pgx.Identifier{config.Database}.Sanitize() +
				" set default_transaction_isolation = 'read committed'",
		}
	}
	set := make(map[string]bool)
	for name := range config.RuntimeParams {
		set[strings.ToLower(name)] = true
	}
	setDefaults := func(defaults map[string]string) {
		for name, value := range defaults {
			if !set[name] {
				config.RuntimeParams[name] = value
			}
		}
	}
	setDefaults(trackedDefaults)
	if r.pooled {
		return nil
	}
	setDefaults(sessionDefaults)
	if !set["idle_in_transaction_session_timeout"] {
		config.RuntimeParams["idle_in_transaction_session_timeout"] = strconv.FormatInt(idle.Milliseconds(), 10)
	}
	config.RuntimeParams["default_transaction_isolation"] = readCommitted // also if the server default changes later
	return nil
}

// probeWithin is probe, with retries for wait while the server is unreachable or starting.
func probeWithin(ctx context.Context, config *pgx.ConnConfig, wait time.Duration) (route, error) {
	deadline := time.Now().Add(wait)
	for {
		r, err := probe(ctx, config)
		if err == nil || !temporary(err) || !time.Now().Before(deadline) {
			return r, err
		}
		select {
		case <-ctx.Done():
			return route{}, errors.Join(ctx.Err(), err)
		case <-time.After(connectRetryEvery):
		}
	}
}

// probe connects once and describes the path to the server.
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

// pooled reports whether conn goes through a pooler: PgBouncer announces a process id that is not the backend's.
func pooled(ctx context.Context, conn *pgx.Conn) (bool, error) {
	var pid uint32
	if err := conn.QueryRow(ctx, "select pg_backend_pid()::bigint", pgx.QueryExecModeExec).Scan(&pid); err != nil {
		return false, fmt.Errorf("read the server's process id: %w", err)
	}
	return pid != conn.PgConn().PID(), nil
}
