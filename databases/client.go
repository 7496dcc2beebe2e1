package databases

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

const (
	maxConns    = 4
	idleTimeout = time.Minute // of a transaction that nobody goes on with
)

// Client opens declared databases. It is safe for concurrent use.
type Client struct {
	DB     postgres.DB              // of the agent, where databases are declared
	Getenv func(name string) string // resolves the URLs

	opening postgres.KeyedMutex[string] // by URL
	mu      sync.Mutex
	pools   map[string]*pgxpool.Pool // by URL
}

// Open returns a database by its name, as a [skills.Databases] does.
func (c *Client) Open(ctx context.Context, name string) (skills.Database, error) {
	d, err := Get(ctx, c.DB, name)
	if errors.Is(err, ErrNotFound) {
		return skills.Database{}, skills.Misconfigured(
			"there is no database %q; a workspace declares one as kind: database", name)
	}
	if err != nil {
		return skills.Database{}, err
	}
	opened, err := c.Reach(ctx, d)
	if err != nil && !errors.As(err, new(*skills.CallError)) {
		return skills.Database{}, &skills.CallError{Class: skills.ClassNetwork, Message: err.Error()}
	}
	return opened, err
}

// Reach opens a database. The error names the setting and never contains the URL. Without the setting it is a
// [skills.CallError] of class configuration.
func (c *Client) Reach(ctx context.Context, d Database) (skills.Database, error) {
	url := strings.TrimSpace(c.Getenv(d.URLEnv))
	if url == "" {
		return skills.Database{}, skills.Misconfigured("set %s, which has the URL of database %s", d.URLEnv, d.Name)
	}
	pool, err := c.pool(ctx, url)
	if err != nil {
		return skills.Database{}, &reachError{d.Name, d.URLEnv, err}
	}
	return skills.Database{Pool: pool, Writes: d.Access == AccessWrite, Role: d.Role}, nil
}

// pool opens the pool of a URL once. It does not delay the opening of other pools.
func (c *Client) pool(ctx context.Context, url string) (*pgxpool.Pool, error) {
	unlock, err := c.opening.Lock(ctx, url)
	if err != nil {
		return nil, err
	}
	defer unlock()
	c.mu.Lock()
	pool := c.pools[url]
	c.mu.Unlock()
	if pool != nil {
		return pool, nil
	}
	pool, err = postgres.Open(ctx, url, postgres.Options{MaxConns: maxConns, IdleTransaction: idleTimeout})
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.pools == nil {
		c.pools = make(map[string]*pgxpool.Pool)
	}
	c.pools[url] = pool
	return pool, nil
}

// Close closes all pools. All calls must have ended.
func (c *Client) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, pool := range c.pools {
		pool.Close()
	}
	c.pools = nil
}

// reachError is an error of opening a database that names its setting.
type reachError struct {
	name, env string
	cause     error
}

func (e *reachError) Error() string {
	text := strings.TrimPrefix(e.cause.Error(), "open database ")
	text = strings.ReplaceAll(strings.TrimPrefix(text, "open database: "), "DATABASE_URL", e.env)
	return fmt.Sprintf("open database %s (%s): %s", e.name, e.env, text)
}

func (e *reachError) Unwrap() error { return e.cause }
