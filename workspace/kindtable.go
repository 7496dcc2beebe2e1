package workspace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// kindTable applies the documents of one kind to one table.
type kindTable[D, R any] struct {
	kind      string
	documents []Document[D]
	name      func(D) string
	get       func(ctx context.Context, db postgres.DB, name string) (R, error)
	notFound  error
	put       func(ctx context.Context, tx pgx.Tx, d D) (changed bool, err error)
	remove    func(ctx context.Context, db postgres.DB, keep []string) ([]string, error)
	declared  []string // the JSON names of the row's fields that a document sets
}

// withTx adapts a Put that takes any [postgres.DB].
func withTx[D any](
	store func(context.Context, postgres.DB, D) (bool, error),
) func(context.Context, pgx.Tx, D) (bool, error) {
	return func(ctx context.Context, tx pgx.Tx, d D) (bool, error) { return store(ctx, tx, d) }
}

func (t kindTable[D, R]) apply(ctx context.Context, tx pgx.Tx, o Options) ([]Item, error) {
	var items []Item
	var problems Problems
	keep := []string{}
	for _, document := range byName(t.documents, t.name) {
		item, err := t.write(ctx, tx, document.Definition)
		if err != nil {
			return nil, err
		}
		if overwritten := item.overwrittenByAdmin(); len(overwritten) > 0 {
			problems.add(document.position("name"), "%s", item.overwriteProblem(overwritten))
		}
		items = append(items, item)
		keep = append(keep, item.Name)
	}
	if err := problems.err(); err != nil {
		return nil, err
	}
	undeclared, err := t.prune(ctx, tx, keep, o)
	return append(items, undeclared...), err
}

// prune removes undeclared rows, except kept ones. A row that it only changes, such as an objective with progress, has
// Changes.
func (t kindTable[D, R]) prune(ctx context.Context, tx pgx.Tx, declared []string, o Options) ([]Item, error) {
	found, err := t.undeclared(ctx, tx, declared)
	if err != nil {
		return nil, err
	}
	items := make([]Item, len(found))
	keep, before := slices.Clone(declared), map[int]R{}
	for i, name := range found {
		items[i] = Item{Kind: t.kind, Name: name, Action: Remove}
		if o.Prune == nil || !o.Prune(items[i]) {
			items[i].Action = Keep
			keep = append(keep, name)
		} else if before[i], err = t.get(ctx, tx, name); err != nil {
			return nil, err
		}
	}
	if len(before) == 0 {
		return items, nil
	}
	if _, err = t.remove(ctx, tx, keep); err != nil {
		return nil, err
	}
	for i, row := range before {
		after, err := t.get(ctx, tx, items[i].Name)
		if err == nil {
			items[i].Changes, err = t.changes(row, after)
		}
		if err != nil && !errors.Is(err, t.notFound) {
			return nil, err
		}
	}
	return items, nil
}

// undeclared lists undeclared workspace rows: it removes the rows in a savepoint and rolls back.
func (t kindTable[D, R]) undeclared(ctx context.Context, tx pgx.Tx, declared []string) ([]string, error) {
	inner, err := tx.Begin(ctx)
	if err != nil {
		return nil, fmt.Errorf("look for undeclared %s rows: %w", t.kind, err)
	}
	found, err := t.remove(ctx, inner, declared)
	if rollbackErr := inner.Rollback(ctx); err == nil && rollbackErr != nil {
		err = fmt.Errorf("look for undeclared %s rows: %w", t.kind, rollbackErr)
	}
	return found, err
}

// write applies one document.
func (t kindTable[D, R]) write(ctx context.Context, tx pgx.Tx, d D) (Item, error) {
	item := Item{Kind: t.kind, Name: t.name(d), Action: Unchanged}
	before, err := t.get(ctx, tx, item.Name)
	if err != nil && !errors.Is(err, t.notFound) {
		return item, err
	}
	if err != nil {
		item.Action = Create
	}
	changed, err := t.put(ctx, tx, d)
	if err != nil || !changed || item.Action == Create {
		return item, err
	}
	item.Action = Update
	after, err := t.get(ctx, tx, item.Name)
	if err != nil {
		return item, err
	}
	item.Changes, err = t.changes(before, after)
	return item, err
}

func (t kindTable[D, R]) changes(before, after R) ([]Change, error) {
	beforeFields, err := fieldsIn(before, t.declared...)
	if err != nil {
		return nil, fmt.Errorf("compare %s: %w", t.kind, err)
	}
	afterFields, err := fieldsIn(after, t.declared...)
	if err != nil {
		return nil, fmt.Errorf("compare %s: %w", t.kind, err)
	}
	return changes(beforeFields, afterFields), nil
}

// byName sorts documents, so all applies lock rows in the same order.
func byName[D any](documents []Document[D], name func(D) string) []Document[D] {
	return slices.SortedFunc(slices.Values(documents), func(a, b Document[D]) int {
		return strings.Compare(name(a.Definition), name(b.Definition))
	})
}
