package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// SourceWorkspace is the source of rows that workspace files declare.
const SourceWorkspace = "workspace"

// Upsert inserts a row into table, or updates the row with the same key columns, and reports whether it wrote. It does
// not write a row with equal values. It wraps an error in verb. key has the key columns, separated by ", ". also has
// further assignments of an update; t is the existing row.
func Upsert(ctx context.Context, db DB, verb, table, key string, row Strict, also ...string) (bool, error) {
	columns := slices.Sorted(maps.Keys(row))
	set := append([]string{"updated_at = clock_timestamp()"}, also...)
	var values []string
	for _, c := range columns {
		if !slices.Contains(strings.Split(key, ", "), c) {
			set, values = append(set, c+" = excluded."+c), append(values, c)
		}
	}
	tag, err := db.Exec(ctx, `insert into `+table+` as t (`+strings.Join(columns, ", ")+`)
		values (@`+strings.Join(columns, ", @")+`)
		on conflict (`+key+`) do update set `+strings.Join(set, ", ")+`
		 where (t.`+strings.Join(values, ", t.")+`) is distinct from (excluded.`+strings.Join(values, ", excluded.")+`)`, row)
	return Changed(tag, err, verb)
}

// PutVersion makes definition the workspace's current version of name and reports whether anything changed. also has
// further columns. The caller serializes calls for one name.
func PutVersion(
	ctx context.Context, db DB, verb, table, name string, definition any, also Strict,
) (bool, error) {
	text, err := json.Marshal(definition)
	if err != nil {
		return false, fmt.Errorf("%s: %w", verb, err)
	}
	sum := sha256.Sum256(text)
	row := Strict{"name": name, "source": SourceWorkspace, "digest": hex.EncodeToString(sum[:16]), "definition": text}
	maps.Copy(row, also)
	columns := slices.Sorted(maps.Keys(row))
	tag, err := db.Exec(ctx, `with same as (
		  select from `+table+` where name = @name and current and digest = @digest and source = @source),
		before as (
		  update `+table+` set current = false where name = @name and current and not exists (select from same) returning 1)
		insert into `+table+` (version, `+strings.Join(columns, ", ")+`)
		select coalesce((select max(v.version) from `+table+` v where v.name = @name), 0) + 1,
		       @`+strings.Join(columns, ", @")+`
		 where (select count(*) from before) >= 0 and not exists (select from same)`, row)
	return Changed(tag, err, verb)
}

// DeleteOthers deletes the workspace's rows except those named keep, and returns the deleted names. kind is for the
// error.
func DeleteOthers(ctx context.Context, db DB, kind, table string, keep []string) ([]string, error) {
	return removeOthers(ctx, db, kind, `delete from `+table+` where true`, keep)
}

// RetireOthers is [DeleteOthers] for a table of versions, and keeps the versions.
func RetireOthers(ctx context.Context, db DB, kind, table string, keep []string) ([]string, error) {
	return removeOthers(ctx, db, kind, `update `+table+` set current = false where current`, keep)
}

func removeOthers(ctx context.Context, db DB, kind, sql string, keep []string) ([]string, error) {
	return Names(ctx, db, "remove "+kind+" of the workspace", sql+`
		   and source = @source and name <> all(@keep::text[]) returning name`,
		Strict{"source": SourceWorkspace, "keep": append([]string{}, keep...)})
}
