package schemadoc

import (
	"cmp"
	"context"
	"io/fs"
	"regexp"
	"slices"
	"strings"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Relation is a table, a view or a composite type.
type Relation struct {
	OID         uint32
	Name        string
	Kind        string // r, p (partitioned), v, c (composite), as pg_class.relkind
	Comment     string
	Columns     []Column     `db:"-"`
	Constraints []Constraint `db:"-"`
	Indexes     []Index      `db:"-"`
}

// Column is a column of a relation.
type Column struct {
	OID     uint32 // of the relation
	Name    string
	Type    string
	Null    bool
	Default string // an expression; "identity" or "generated" where the server makes the value
	Comment string
}

// Constraint is a key, a check or a reference.
type Constraint struct {
	OID     uint32
	Kind    string // p, u, f, c, x, as pg_constraint.contype
	Columns []string
	Target  string // of a reference: the table
	Text    string // as pg_get_constraintdef
}

// Index is an index without a constraint.
type Index struct {
	OID     uint32
	Name    string
	Unique  bool
	Text    string // from the columns on
	Comment string
}

// Function is a function of the contract.
type Function struct {
	Name      string
	Arguments string
	Result    string
	Comment   string
}

// Closed is an enum or a domain.
type Closed struct {
	Name    string
	Base    string // of a domain
	Values  []string
	Check   string // of a domain
	Comment string
}

// Bookkeeping are the tables that no file of the schema creates.
var Bookkeeping = []string{"agent_migrations", "agent_schema_code"}

// Read reads the nouns from the files, and their content from the database.
func Read(ctx context.Context, db postgres.DB, files fs.FS) ([]*Noun, error) {
	nouns, places, err := readNouns(files)
	if err != nil {
		return nil, err
	}
	relations, err := relations(ctx, db)
	if err != nil {
		return nil, err
	}
	for _, r := range relations {
		n := nouns[find(places, r.Name).file]
		switch r.Kind {
		case "v":
			n.Views = append(n.Views, r)
		case "c":
			n.Types = append(n.Types, r)
		default:
			n.Tables = append(n.Tables, r)
		}
	}
	if err := readCode(ctx, db, nouns, places); err != nil {
		return nil, err
	}
	order := func(a, b string) int { return cmp.Compare(find(places, a).statement, find(places, b).statement) }
	for _, n := range nouns {
		for _, all := range [][]*Relation{n.Tables, n.Views, n.Types} {
			slices.SortStableFunc(all, func(a, b *Relation) int { return order(a.Name, b.Name) })
		}
		slices.SortStableFunc(n.Calls, func(a, b Function) int { return order(a.Name, b.Name) })
		slices.SortStableFunc(n.Closed, func(a, b Closed) int { return order(a.Name, b.Name) })
	}
	return nouns, nil
}

// relations reads the tables, views and composite types of the tables' schema.
func relations(ctx context.Context, db postgres.DB) ([]*Relation, error) {
	all, err := postgres.Rows[Relation](ctx, db, "read the catalogue", `
		select c.oid, c.relname::text as name, c.relkind::text as kind,
		       coalesce(obj_description(case when c.relkind = 'c' then c.reltype else c.oid end), '') as comment
		  from pg_class c
		 where c.relnamespace = current_schema()::regnamespace and c.relkind in ('r', 'p', 'v', 'c')
		   and not c.relispartition and c.relname <> all (@bookkeeping::text[])
		 order by c.relname`, postgres.Strict{"bookkeeping": Bookkeeping})
	if err != nil {
		return nil, err
	}
	byOID := map[uint32]*Relation{}
	ids := make([]uint32, len(all))
	for i := range all {
		byOID[all[i].OID], ids[i] = &all[i], all[i].OID
	}
	columns, err := postgres.Rows[Column](ctx, db, "read the catalogue", `
		select a.attrelid as oid, a.attname::text as name, format_type(a.atttypid, a.atttypmod) as type,
		       not a.attnotnull as null,
		       case when a.attidentity <> '' then 'identity' when a.attgenerated <> '' then 'generated'
		            else coalesce(pg_get_expr(d.adbin, d.adrelid), '') end as default,
		       coalesce(col_description(a.attrelid, a.attnum), '') as comment
		  from pg_attribute a left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
		 where a.attrelid = any (@ids::oid[]) and a.attnum > 0 and not a.attisdropped
		 order by a.attrelid, a.attnum`, postgres.Strict{"ids": ids})
	if err != nil {
		return nil, err
	}
	for _, c := range columns {
		c.Type, c.Default = short(c.Type), short(c.Default)
		byOID[c.OID].Columns = append(byOID[c.OID].Columns, c)
	}
	if err := readRules(ctx, db, byOID, ids); err != nil {
		return nil, err
	}
	pointers := make([]*Relation, len(all))
	for i := range all {
		pointers[i] = &all[i]
	}
	return pointers, nil
}

// readRules reads the constraints and indexes of relations.
func readRules(ctx context.Context, db postgres.DB, byOID map[uint32]*Relation, ids []uint32) error {
	constraints, err := postgres.Rows[Constraint](ctx, db, "read the catalogue", `
		select k.conrelid as oid, k.contype::text as kind, pg_get_constraintdef(k.oid, true) as text,
		       coalesce((select f.relname::text from pg_class f where f.oid = k.confrelid), '') as target,
		       array(select a.attname::text from unnest(k.conkey) with ordinality u (num, place)
		               join pg_attribute a on a.attrelid = k.conrelid and a.attnum = u.num order by u.place) as columns
		  from pg_constraint k where k.conrelid = any (@ids::oid[]) and k.contype in ('p', 'u', 'f', 'c', 'x')
		 order by k.conrelid, strpos('pufcx', k.contype::text), k.conname`, postgres.Strict{"ids": ids})
	if err != nil {
		return err
	}
	for _, c := range constraints {
		c.Text = short(c.Text)
		byOID[c.OID].Constraints = append(byOID[c.OID].Constraints, c)
	}
	indexes, err := postgres.Rows[Index](ctx, db, "read the catalogue", `
		select i.indrelid as oid, c.relname::text as name, i.indisunique as unique,
		       coalesce(obj_description(c.oid, 'pg_class'), '') as comment,
		       regexp_replace(pg_get_indexdef(c.oid, 0, true), '^.* USING ', '') as text
		  from pg_index i join pg_class c on c.oid = i.indexrelid
		 where i.indrelid = any (@ids::oid[])
		   and not exists (select from pg_constraint k where k.conindid = c.oid and k.contype in ('p', 'u', 'x'))
		 order by i.indrelid, c.relname`, postgres.Strict{"ids": ids})
	if err != nil {
		return err
	}
	for _, x := range indexes {
		x.Text = short(strings.TrimPrefix(x.Text, "btree "))
		byOID[x.OID].Indexes = append(byOID[x.OID].Indexes, x)
	}
	return nil
}

// readCode reads the functions of the contract, the enums and the domains.
func readCode(ctx context.Context, db postgres.DB, nouns []*Noun, places map[string]place) error {
	functions, err := postgres.Rows[Function](ctx, db, "read the catalogue", `
		select p.proname::text as name, pg_get_function_arguments(p.oid) as arguments,
		       coalesce(pg_get_function_result(p.oid), '') as result,
		       coalesce(obj_description(p.oid, 'pg_proc'), '') as comment
		  from pg_proc p
		 where p.pronamespace = current_schema()::regnamespace and p.prorettype <> 'trigger'::regtype
		   and not exists (select from pg_depend d where d.objid = p.oid and d.deptype = 'e')
		 order by p.proname, p.oid`)
	if err != nil {
		return err
	}
	for _, f := range functions {
		f.Arguments, f.Result = short(f.Arguments), short(f.Result)
		n := nouns[find(places, f.Name).file]
		n.Calls = append(n.Calls, f)
	}
	closed, err := postgres.Rows[Closed](ctx, db, "read the catalogue", `
		select t.typname::text as name, coalesce(format_type(nullif(t.typbasetype, 0), null), '') as base,
		       array(select e.enumlabel::text from pg_enum e where e.enumtypid = t.oid order by e.enumsortorder) as values,
		       coalesce((select string_agg(pg_get_constraintdef(k.oid, true), '; ' order by k.conname) from pg_constraint k
		                  where k.contypid = t.oid and k.contype = 'c'), '') as check,
		       coalesce(obj_description(t.oid, 'pg_type'), '') as comment
		  from pg_type t where t.typnamespace = current_schema()::regnamespace and t.typtype in ('e', 'd')
		   and not exists (select from pg_depend d where d.objid = t.oid and d.deptype = 'e')
		 order by t.typname`)
	if err != nil {
		return err
	}
	for _, c := range closed {
		c.Check = short(c.Check)
		n := nouns[find(places, c.Name).file]
		n.Closed = append(n.Closed, c)
	}
	return nil
}

var (
	// casts are types that a constant, or a compared column, already has in its place. Others decide what the
	// expression means.
	casts = regexp.MustCompile(`('[^']*'|\b\d+|\]|\bNULL)::(?:text\[\]|text|jsonb|numeric|interval|uuid\[\]|uuid|bigint|bytea|name|` +
		`regconfig|"char"|timestamp with time zone)|(\w)::text( (?:=|<>) )`)
	// keywords are words that the server writes in capitals; constants stay as they are.
	keywords = regexp.MustCompile(`'[^']*'|\b[A-Z]+\b`)
	// anyOf matches the server's form of a list of values.
	anyOf = regexp.MustCompile(`(= ANY|<> ALL) \(ARRAY\[([^\]]*)\]\)`)
	// storage matches the storage options of an index.
	storage = regexp.MustCompile(` WITH \([a-z_]+=[a-z]+\)`)
)

// short removes the parts of an expression that a reader does not need.
func short(text string) string {
	text = storage.ReplaceAllString(casts.ReplaceAllString(text, "$1$2$3"), "")
	text = anyOf.ReplaceAllStringFunc(text, func(m string) string {
		part := anyOf.FindStringSubmatch(m)
		if part[1] == "= ANY" {
			return "in (" + part[2] + ")"
		}
		return "not in (" + part[2] + ")"
	})
	text = keywords.ReplaceAllStringFunc(text, func(m string) string {
		if m[0] == '\'' {
			return m
		}
		return strings.ToLower(m)
	})
	text = strings.ReplaceAll(text, "timestamp with time zone", "timestamptz")
	text = strings.ReplaceAll(text, "double precision", "float8")
	return strings.Join(strings.Fields(text), " ")
}
