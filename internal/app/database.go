package app

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/replica"
	"github.com/lanekeeper/lanekeeper/migrations"
)

// Database is a process's connections.
type Database struct {
	Pool *pgxpool.Pool
	// Direct bypasses a pooler; nil without DATABASE_DIRECT_URL.
	Direct *pgxpool.Pool
	// Read is the source of pages and queries: a replica, or the primary.
	Read     *replica.Reader
	reserved reservedPools
}

// Connect opens the pools for a database. serving reserves connections for readiness, the admin and visitors. A wrong
// setting is a *config.Error.
func Connect(
	ctx context.Context, cfg config.Config, url string, serving bool, log *slog.Logger,
) (_ Database, err error) {
	var d Database
	defer func() {
		if err != nil {
			d.Close()
		}
	}()
	options := postgres.Options{
		MaxConns: int32(min(cfg.Workers, 1000)) + 12, IdleTransaction: idleTransaction(cfg.WorkerLease),
	}
	var reserved reservation
	if serving {
		options.Reserve = func(total int32) int32 {
			reserved = reserveConns(total)
			return reserved.system + reserved.admin + reserved.visitors
		}
	}
	if d.Pool, err = postgres.Open(ctx, url, options); err != nil {
		return d, err
	}
	if err := d.reserve(ctx, reserved); err != nil {
		return d, err
	}
	isDefault := url == cfg.DatabaseURL.Reveal() // the other addresses are of this database
	if cfg.DirectURL.IsSet() && isDefault {
		if err := d.openDirect(ctx, cfg); err != nil {
			return d, err
		}
	}
	d.Read = d.newReader(cfg, isDefault, serving, log)
	return d, nil
}

// Close closes all connections.
func (d *Database) Close() {
	if d.Read != nil {
		d.Read.Close()
	}
	for _, pool := range append(d.reserved.pools, d.Pool, d.Direct) {
		if pool != nil {
			pool.Close()
		}
	}
}

// Sessions returns the pool with real server sessions, for LISTEN and session locks.
func (d *Database) Sessions() *pgxpool.Pool { return cmp.Or(d.Direct, d.Pool) }

// admin returns the pool of the admin's requests.
func (d *Database) admin() *pgxpool.Pool { return cmp.Or(d.reserved.admin, d.Pool) }

// idleTransaction bounds idle transactions by the lease, from 5 seconds to a minute. The row locks of a lost worker
// should not outlive its claims for long.
func idleTransaction(lease time.Duration) time.Duration {
	return min(max(lease, 5*time.Second), time.Minute)
}

// directConns bounds the connections that bypass a pooler. The listener holds one, a migration two.
const directConns = 4

// openDirect opens a pool that bypasses a connection pooler. It must reach the same database, or notifications and
// schema would differ.
func (d *Database) openDirect(ctx context.Context, cfg config.Config) error {
	pool, err := postgres.Open(ctx, cfg.DirectURL.Reveal(), postgres.Options{MaxConns: directConns})
	if err != nil {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", postgres.ForSetting("DATABASE_DIRECT_URL", err))
	}
	d.Direct = pool
	if postgres.Pooled(pool) {
		return settingError("DATABASE_DIRECT_URL: it also names a connection pooler; name the host and port of PostgreSQL " +
			"itself, or unset it to poll")
	}
	same, err := sameDatabase(ctx, d.Pool, pool)
	if err != nil {
		return fmt.Errorf("DATABASE_DIRECT_URL: %w", err)
	}
	if !same {
		return settingError("DATABASE_DIRECT_URL: not the database of DATABASE_URL; name the database behind the pooler, " +
			"or unset it to poll")
	}
	return nil
}

// settingError reports a wrong setting.
func settingError(format string, args ...any) error {
	return &config.Error{Problems: []string{fmt.Sprintf(format, args...)}}
}

// sameDatabase reports whether all pools reach one database of one running server.
func sameDatabase(ctx context.Context, pools ...*pgxpool.Pool) (bool, error) {
	var firstID string
	for i, pool := range pools {
		var id string
		err := pool.QueryRow(ctx, `
			select concat_ws(' ', extract(epoch from pg_postmaster_start_time()),
			  (select oid from pg_database where datname = current_database()))`).Scan(&id)
		if err != nil {
			return false, fmt.Errorf("compare the databases: %w", err)
		}
		if i == 0 {
			firstID = id
		} else if id != firstID {
			return false, nil
		}
	}
	return true, nil
}

// minDividedPool is the smallest pool with reserved connections. Smaller pools are shared.
const minDividedPool = 6

// reservation counts a serving process's reserved connections by purpose. The engine gets the rest.
type reservation struct{ system, admin, visitors int32 }

// reserveConns divides a pool of total connections.
func reserveConns(total int32) reservation {
	if total < minDividedPool {
		return reservation{}
	}
	share := min(max(total/7, 1), 8)
	return reservation{system: min(total/minDividedPool, 2), admin: share, visitors: share}
}

// reservedPools are pools beside the engine's. They are nil when the process does not serve, or has few connections.
type reservedPools struct {
	system   *pgxpool.Pool // readiness, and the worker's lease
	admin    *pgxpool.Pool // the API and the Engine Room
	visitors *pgxpool.Pool // requests of visitors and of strangers
	pools    []*pgxpool.Pool
}

func (d *Database) reserve(ctx context.Context, sizes reservation) error {
	for _, part := range []struct {
		into **pgxpool.Pool
		size int32
	}{
		{&d.reserved.system, sizes.system}, {&d.reserved.admin, sizes.admin}, {&d.reserved.visitors, sizes.visitors},
	} {
		if part.size == 0 {
			continue
		}
		pool, err := postgres.Reserve(ctx, d.Pool, part.size)
		if err != nil {
			return err
		}
		*part.into, d.reserved.pools = pool, append(d.reserved.pools, pool)
	}
	return nil
}

// replicaConns bounds the connections to the read replica.
const replicaConns = 8

// newReader reads from DATABASE_READ_URL if set, else from the primary.
func (d *Database) newReader(cfg config.Config, isDefault, serving bool, log *slog.Logger) *replica.Reader {
	if !cfg.ReadURL.IsSet() || !isDefault {
		return replica.Primary(d.admin())
	}
	if !serving { // commands print the source themselves
		log = nil
	}
	return replica.New(replica.Options{
		Primary: d.admin(), Probe: cmp.Or(d.reserved.system, d.Pool),
		Open: openReplica(cfg), Check: migrations.Check, Logger: log,
		// With more lag, leases of live workers and lanes would look expired.
		MaxLag: cfg.WorkerLease / 3,
	})
}

// ReplicaOnly reads from DATABASE_READ_URL, without a primary.
func ReplicaOnly(cfg config.Config) *replica.Reader {
	return replica.New(replica.Options{Open: openReplica(cfg), Check: migrations.Check})
}

func openReplica(cfg config.Config) func(ctx context.Context) (*pgxpool.Pool, error) {
	url := cfg.ReadURL.Reveal()
	return func(ctx context.Context) (*pgxpool.Pool, error) {
		if hosts := hostsOf(url); hosts > 1 {
			return nil, fmt.Errorf("it names %d servers with different lags: %w", hosts, replica.ErrOther)
		}
		pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: replicaConns})
		if err != nil {
			return nil, postgres.ForSetting("DATABASE_READ_URL", err)
		}
		return pool, nil
	}
}

// hostsOf counts the servers in a connection string; 0 if it is invalid.
func hostsOf(url string) int {
	c, err := pgx.ParseConfig(url)
	if err != nil {
		return 0
	}
	address := func(host string, port uint16) string {
		return net.JoinHostPort(host, strconv.Itoa(int(port)))
	}
	hosts := map[string]bool{address(c.Host, c.Port): true}
	for _, other := range c.Fallbacks { // pgx may list a server several times, with and without TLS
		hosts[address(other.Host, other.Port)] = true
	}
	return len(hosts)
}
