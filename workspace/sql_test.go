package workspace_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/databases"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/workspace"
)

// withLimit has the parameters of the query of sqlCases.
const withLimit = "\nparameters: {type: object, properties: {limit: {}}}\n"

// sqlCases are files with a wrong query, and the error of apply with its position.
var sqlCases = map[string]struct{ text, want string }{
	"literal block": {
		"config:\n  query: |\n    select id\n    from orders\n\n    where statis = 'late' limit @limit" + withLimit,
		`a.yaml:9:11: sql: column "statis" does not exist (did you mean "status"?)`,
	},
	"behind parameter": {
		"config:\n  query: |-\n      select id from orders limit @limit offset nope(1)" + withLimit,
		"a.yaml:6:49: sql: function nope(integer) does not exist; No function matches",
	},
	"folded block": {
		"config:\n  query: >\n    select id, 'ñandú'\n" +
			"    from orders\n    where statis = 'late' limit @limit" + withLimit,
		`a.yaml:8:11: sql: column "statis" does not exist`,
	},
	"single quotes": {
		"config:\n  query: 'select ''a'', statis from orders limit @limit'" + withLimit,
		`a.yaml:5:25: sql: column "statis" does not exist`,
	},
	"double quotes": {
		"config:\n  query: \"select 'a',\\n\\\"statis\\\" from orders limit @limit\"" + withLimit,
		`a.yaml:5:24: sql: column "statis" does not exist`,
	},
	"escape by number": {
		"config:\n  query: \"select '\\u0041', statis from orders limit @limit\"" + withLimit,
		`a.yaml:5:10: sql: column "statis" does not exist`,
	},
	"plain text": {
		"config:\n  query: select id\n    from orders where statis = 'x' limit @limit" + withLimit,
		`a.yaml:6:23: sql: column "statis" does not exist`,
	},
	"wrong table": {
		"config: {query: select id from oders limit @limit}" + withLimit,
		`a.yaml:4:32: sql: relation "oders" does not exist (did you mean "orders"?)`,
	},
	"unknown type": {
		"config: {query: select 1 as x where @limit is null}" + withLimit,
		"a.yaml:4:17: sql: could not determine data type of parameter @limit; add the type, for example @limit::int",
	},
	"an update": {
		"config:\n  query: |\n    -- late\n    update orders set status = 'x' where id = @limit" + withLimit,
		"a.yaml:7:5: sql: only one read-only query is possible: select, with, values or table; " +
			"to write to a named database, declare config.writes; this begins with update",
	},
	"a typing error": {
		"config: {query: selct id from orders limit @limit}" + withLimit,
		"a.yaml:4:17: sql: only one read-only query is possible: select, with, values or table; " +
			"to write to a named database, declare config.writes; this begins with \"selct\" (did you mean \"select\"?)",
	},
	"a colon": {
		"config:\n  query: select id from orders limit :limit + @limit" + withLimit,
		`a.yaml:5:38: sql: syntax error at or near ":"; a parameter is written @name, not :name`,
	},
	"hidden insert": {
		"config: {query: with i as (insert into orders values (@limit) returning id) select id from i}" + withLimit,
		"a.yaml:4:22: sql: only one read-only query is possible",
	},
	"equal columns": {
		"config:\n  query: |\n    -- all\n    select o.id, p.id from orders o, orders p limit @limit" + withLimit,
		`a.yaml:7:5: sql: several columns have the name "id"; give each its own name with as`,
	},
	"two statements": {
		"config: {query: select 1; select @limit::int}" + withLimit,
		"a.yaml:4:17: sql: only one read-only query is possible",
	},
}

func TestApplyPreparesQueries(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	pgtest.Exec(t, pool, `create table orders (id int, status text)`)
	for name, c := range sqlCases {
		t.Run(name, func(t *testing.T) {
			w := load(t, "a.yaml", "kind: skill\nname: late\nhandler: \"sql:\"\n"+c.text)
			_, err := workspace.Apply(t.Context(), pool, w, workspace.Options{})
			assert.Truef(t, errors.As(err, new(workspace.Problems)) && strings.HasPrefix(err.Error(), c.want),
				"error is %v\nwant %s", err, c.want)
		})
	}
	inline := load(t, "a.yaml", "kind: skill\nname: late\nhandler: sql:select statis from orders\n")
	_, err := workspace.Plan(t.Context(), pool, inline, workspace.Options{})
	assert.Truef(t, err != nil && strings.HasPrefix(err.Error(), `a.yaml:3:21: sql: column "statis"`),
		"in the handler: %v", err)
	rows := versions(t, pool)
	assert.Truef(t, len(rows) == 0, "left behind: %v", rows)
}

// shop is a workspace with a named database and a skill on it.
const shop = `kind: database
name: shop
url_env: SHOP_DATABASE_URL
access: write
---
kind: skill
name: close
parameters: {type: object, properties: {id: {type: integer}}}
handler: "sql:"
config:
  database: shop
  writes: true
  query: |
    update orders set status = 'closed'
    where id = @id returning id, status
`

func TestNamedDatabasesPrepareQueries(t *testing.T) {
	t.Parallel()
	pool, there := pgtest.DB(t), pgtest.DB(t)
	pgtest.Exec(t, there, `create table orders (id int, status text)`)
	openURL := func(url string) workspace.Options {
		c := &databases.Client{DB: pool, Getenv: func(string) string { return url }}
		t.Cleanup(c.Close)
		return workspace.Options{OpenDatabase: c.Reach}
	}
	right := there.Config().ConnString()
	wrong := func(old, replaced string) string { return strings.Replace(shop, old, replaced, 1) }
	for name, c := range map[string]struct{ text, url, want string }{
		"no setting": {shop, "", "a.yaml:3:10: url_env: set SHOP_DATABASE_URL, which has the URL of database shop"},
		"no URL": {
			shop, "postgres://u:p@ss@h/x",
			"a.yaml:3:10: url_env: open database shop (SHOP_DATABASE_URL): cannot read",
		},
		"no database": {shop, urlWithoutTables(t, there), "a.yaml:3:10: url_env: open database shop (SHOP_DATABASE_URL):"},
		"wrong column": {
			wrong("status =", "statis ="), right,
			`a.yaml:14:23: sql: column "statis" of relation "orders" does not exist`,
		},
		"reads only": {
			wrong("access: write", "access: read"), right,
			"a.yaml:12:11: config.writes: database shop has access: read",
		},
		"not declared": {
			wrong("database: shop", "database: shp"), right,
			`a.yaml:11:13: config.database: there is no database "shp"; did you mean "shop"?`,
		},
		"a transaction": {
			wrong("update orders set status = 'closed'\n    where", "call f(@id) --"), right,
			`a.yaml:14:5: sql: "call" is not possible`,
		},
		"a URL in it": {
			wrong("SHOP_DATABASE_URL", `"postgres://u:hunter2@h/x"`), right,
			"a.yaml:3:10: url_env: must be the name",
		},
		"the agent's": {
			wrong("SHOP_DATABASE_URL", "DATABASE_URL"), right,
			"a.yaml:3:10: url_env: DATABASE_URL is the agent's own",
		},
		"writes at home": {wrong("  database: shop\n", ""), right, "a.yaml:11:11: config.writes: needs config.database"},
	} {
		t.Run(name, func(t *testing.T) {
			err := loadAndPlan(t.Context(), pool, c.text, openURL(c.url))
			assert.Truef(t, err != nil && strings.HasPrefix(err.Error(), c.want) && !strings.Contains(err.Error(), "hunter2"),
				"error is %v\nwant %s", err, c.want)
		})
	}
	o := openURL("postgres://u:hunter2@127.0.0.1:1/x")
	away, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", shop), o)
	assert.Truef(t, err == nil && len(away.Warnings) == 1 &&
		strings.Contains(away.Warnings[0], "its queries were not checked"), "away: %v, %v", away.Warnings, err)
	d, err := workspace.Apply(t.Context(), pool, load(t, "a.yaml", shop), openURL(right))
	if err != nil || !d.Empty() || len(d.Warnings) != 0 {
		t.Errorf("there: %v %v, %v", actions(d), d.Warnings, err)
	}
	assert.Equal(t, "agent_effects", pgtest.Value[string](t, there, `select to_regclass('agent_effects')::text`))
	s, err := skills.Get(t.Context(), pool, "close")
	assert.Truef(t, err == nil && s.Idempotent, "a writing skill: idempotent %v, %v", s.Idempotent, err)
}

// urlWithoutTables returns the URL of a missing database on the server of pool.
func urlWithoutTables(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	c := pool.Config().ConnConfig
	return strings.Replace(c.ConnString(), c.Database, "nothing_here", 1)
}

func loadAndPlan(ctx context.Context, pool *pgxpool.Pool, text string, o workspace.Options) error {
	w, err := workspace.Load(files("a.yaml", text))
	if err != nil {
		return err
	}
	_, err = workspace.Plan(ctx, pool, w, o)
	return err
}
