// Package databases stores the databases of sql: skills, besides the agent's own.
//
// A database is a row of agent_databases: its name, the environment variable with its URL, the access, and the role of
// the queries. A workspace declares it ([Definition]). The URL is a secret: only the calling process reads it, from its
// environment. No row, message or log contains it.
//
// Access read is the default: each query is a read-only transaction that is rolled back. With access write, a skill
// with config.writes may change the database. Its effect is exactly once: package skills writes the step's key into the
// table agent_effects of that database, in the transaction of the effect.
//
// The [Client] opens a pool at the first call and keeps it. A call without the setting fails with
// skills.ClassConfiguration, which names the variable and does not count as a failure of the skill.
package databases

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Access of skills to a database.
const (
	AccessRead  = "read"
	AccessWrite = "write"
)

// ErrNotFound reports an undeclared database.
var ErrNotFound = errors.New("database not found")

// Definition declares a database in a workspace file.
type Definition struct {
	Name        string `yaml:"name" json:"name"`
	Description string `yaml:"description" json:"description,omitempty"`
	URLEnv      string `yaml:"url_env" json:"url_env"`         // the variable that has the URL
	Access      string `yaml:"access" json:"access,omitempty"` // read, the default, or write
	Role        string `yaml:"role" json:"role,omitempty"`     // queries run as it; empty for the URL's user
}

// Database is a declared database.
type Database struct {
	Name        string    `json:"name"`
	Description string    `json:"description"`
	URLEnv      string    `json:"url_env"`
	Access      string    `json:"access"`
	Role        string    `json:"role"`
	Source      string    `json:"source"`
	CreatedAt   time.Time `json:"created_at"`
	UpdatedAt   time.Time `json:"updated_at"`
}

var (
	namePattern = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)
	envPattern  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,127}$`)
)

// Validate returns all problems of d, each as "field path: problem".
func Validate(d Definition) error {
	var problems fielderr.List
	if !namePattern.MatchString(d.Name) {
		problems.Add("name", "%q must be a letter, then letters, digits, _ and -, 64 at most", d.Name)
	}
	switch {
	case d.URLEnv == "":
		problems.Add("url_env", "is missing; name the environment variable that has the URL")
	case !envPattern.MatchString(d.URLEnv):
		// Not shown: it may be the URL itself, with a password.
		problems.Add("url_env", "must be the name of an environment variable, like SHOP_DATABASE_URL; the URL itself "+
			"does not belong in a file")
	case d.URLEnv == "DATABASE_URL":
		problems.Add("url_env", "DATABASE_URL is the agent's own database, which sql: skills without config.database "+
			"query; name another variable")
	}
	if d.Access != "" && d.Access != AccessRead && d.Access != AccessWrite {
		problems.Add("access", "%q is not one of read, write", d.Access)
	}
	if len(d.Role) > 63 {
		problems.Add("role", "must have at most 63 bytes")
	}
	return errors.Join(problems...)
}

const (
	maxConns    = 4
	idleTimeout = time.Minute // bounds an idle transaction
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
		return skills.Database{}, skills.NewConfigError(
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
		return skills.Database{}, skills.NewConfigError("set %s, which has the URL of database %s", d.URLEnv, d.Name)
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

// Put stores the declaration d and reports whether it changed anything.
func Put(ctx context.Context, db postgres.DB, d Definition) (changed bool, err error) {
	if err := Validate(d); err != nil {
		return false, fmt.Errorf("put database %q: %w", d.Name, err)
	}
	verb := fmt.Sprintf("put database %q", d.Name)
	return postgres.Upsert(ctx, db, verb, "agent_databases", "name", postgres.Strict{
		"name": d.Name, "description": d.Description, "url_env": d.URLEnv, "access": cmp.Or(d.Access, AccessRead),
		"role": d.Role, "source": postgres.SourceWorkspace,
	})
}

// Remove deletes the workspace's databases except keep, and returns their names.
func Remove(ctx context.Context, db postgres.DB, keep []string) ([]string, error) {
	return postgres.DeleteOthers(ctx, db, "databases", "agent_databases", keep)
}

// Get returns one database, or [ErrNotFound].
func Get(ctx context.Context, db postgres.DB, name string) (Database, error) {
	return postgres.RowOr[Database](ctx, db, ErrNotFound, fmt.Sprintf("get database %q", name), `
		select name, description, url_env, access, role, source, created_at, updated_at
		  from agent_databases where name = @name`, postgres.Strict{"name": name})
}

// List returns the declared databases by name.
func List(ctx context.Context, db postgres.DB) ([]Database, error) {
	return postgres.Rows[Database](ctx, db, "list databases", `
		select name, description, url_env, access, role, source, created_at, updated_at
		  from agent_databases order by name limit 1000`)
}
