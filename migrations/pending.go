package migrations

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// pendingSteps returns the steps that a database lacks, in order.
func (r release) pendingSteps(ctx context.Context, pool *pgxpool.Pool) ([]step, error) {
	rows, err := pool.Query(ctx, `select m.version, m.name, m.hash from agent_migrations m order by m.version`)
	type row struct {
		Version    int
		Name, Hash string
	}
	applied, err := postgres.Collect(rows, err, "read agent_migrations", pgx.RowToStructByPos[row])
	if err != nil {
		return nil, err
	}
	var former, done int
	baselineHash := "" // of the applied baseline; empty for none
	for _, a := range applied {
		switch {
		case a.Version < baseline:
			former = a.Version
			if hash := bridges[former]; hash != "" && a.Hash != hash {
				return nil, fmt.Errorf("migration %s: %w", a.Name, ErrChanged)
			}
		case a.Version == baseline:
			baselineHash = a.Hash
		case done == len(r.changes):
			return nil, fmt.Errorf("schema version %d: %w", a.Version, ErrNewer)
		case a.Hash != r.changes[done].hash:
			return nil, fmt.Errorf("migration %s: %w", a.Name, ErrChanged)
		default:
			done++
		}
	}
	switch {
	case baselineHash == "" && former > 0 && bridges[former] == "":
		return nil, fmt.Errorf("schema version %d: %w", former, ErrOld)
	case baselineHash == "" && former == 0:
		return r.baselineSteps(0), rejectLostVersions(ctx, pool)
	case baselineHash == "":
		return r.baselineSteps(former), nil
	case baselineHash != digest(r.tables()):
		return nil, fmt.Errorf("schema version %d: %w", baseline, ErrChanged)
	}
	changed, err := r.changedCode(ctx, pool)
	if err != nil {
		return nil, err
	}
	return r.changeSteps(r.changes[done:], changed), nil
}

// firstVersionWithTypes is the first version that has the types of the first file.
const firstVersionWithTypes = 200

var (
	creates     = regexp.MustCompile(`(?m)^create (?:unlogged )?(?:table|(?:unique )?index)\b`)
	createsType = regexp.MustCompile(`(?ms)^create type .*?;\n`)
)

// baselineSteps returns the baseline, or the bridge from a former version, and everything after it.
func (r release) baselineSteps(former int) []step {
	first := step{version: baseline, hash: digest(r.tables()), code: r.files}
	types := r.files[0]
	rest := strings.TrimPrefix(r.tables(), types.tables)
	switch former {
	case 0:
		first.what, first.names = "the baseline", []string{"baseline"}
		first.sql = types.tables + types.code + rest // defaults and checks of tables call functions of types
	default:
		first.what, first.names = fmt.Sprintf("the bridge from version %d", former), []string{"bridge"}
		first.sql = r.bridges[former] + creates.ReplaceAllString(createsType.ReplaceAllString(rest, ""), "$0 if not exists")
		if former < firstVersionWithTypes {
			first.sql = types.tables + first.sql
		}
	}
	return append([]step{first}, r.changeSteps(r.changes, nil)...)
}

// changeSteps returns the steps for changes. Changed code joins the last step. Without a change, or if the last change
// runs outside a transaction, changed code is a step of its own.
func (r release) changeSteps(changes []change, code []schemaFile) []step {
	var steps []step
	for _, c := range changes {
		steps = append(steps, step{
			what: "migration " + c.name, version: c.version, hash: c.hash, sql: c.sql,
			names: []string{c.name},
		})
	}
	if len(code) == 0 {
		return steps
	}
	if n := len(steps); n > 0 && !steps[n-1].outside() {
		steps[n-1].code = code
	} else {
		steps = append(steps, step{what: "the code", code: code})
	}
	last := &steps[len(steps)-1]
	for _, n := range code {
		last.names = append(last.names, "code of "+n.name)
	}
	return steps
}

// changedCode lists the files whose code differs from the database's.
func (r release) changedCode(ctx context.Context, pool *pgxpool.Pool) ([]schemaFile, error) {
	rows, err := pool.Query(ctx, `select c.name, c.hash from agent_schema_code c`)
	if err != nil {
		return nil, fmt.Errorf("read agent_schema_code: %w", err)
	}
	var name, hash string
	applied := map[string]string{} // hash by name
	if _, err := pgx.ForEachRow(rows, []any{&name, &hash}, func() error { applied[name] = hash; return nil }); err != nil {
		return nil, fmt.Errorf("read agent_schema_code: %w", err)
	}
	var changed []schemaFile
	for _, n := range r.files {
		if applied[n.name] != digest(n.code) {
			changed = append(changed, n)
		}
	}
	return changed, nil
}
