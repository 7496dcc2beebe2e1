package skills_test

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/skills"
)

// shop is a registry with a named database, and that database with an account of 100.
func shop(t *testing.T, role string) (*skills.Registry, *pgxpool.Pool) {
	t.Helper()
	there := pgtest.DB(t)
	_, err := there.Exec(t.Context(), `
		create table account (id int, amount int); insert into account values (1, 100)`)
	if err != nil {
		t.Fatal(err)
	}
	r := registry(t, skills.Options{Databases: func(_ context.Context, name string) (skills.Database, error) {
		switch name {
		case "shop":
			return skills.Database{Pool: there, Writes: true, Role: role}, nil
		case "read":
			return skills.Database{Pool: there, Role: role}, nil
		}
		return skills.Database{}, skills.Misconfigured("set %s_URL", name)
	}})
	return r, there
}

// pay is a skill that takes an amount from the account.
func pay(t *testing.T, query string, config map[string]any) skills.Skill {
	t.Helper()
	all := map[string]any{"database": "shop", "writes": true, "query": query}
	maps.Copy(all, config)
	return row(t, skills.Definition{
		Name: "pay", Handler: "sql:", Config: all,
		Parameters: object(map[string]any{"n": map[string]any{"type": "integer"}}),
	})
}

const payQuery = `update account set amount = amount - @n where id = 1 returning amount`

func amount(t *testing.T, there *pgxpool.Pool) (n int) {
	t.Helper()
	if err := there.QueryRow(t.Context(), `select amount from account where id = 1`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestACallThatIsRepeatedUnderItsKeyWritesOnce(t *testing.T) {
	t.Parallel()
	r, there := shop(t, "")
	s := pay(t, payQuery, nil)
	group, ctx := errgroup.WithContext(t.Context())
	answers := make([]string, 8)
	for i := range answers {
		group.Go(func() error {
			raw, err := r.Invoke(ctx, skills.Call{Skill: s, Args: json.RawMessage(`{"n": 7}`), IdempotencyKey: "k1"})
			answers[i] = string(raw)
			return err
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	for _, answer := range answers {
		var got sqlAnswer
		err := json.Unmarshal([]byte(answer), &got)
		if err != nil || got.RowCount != 1 || got.Rows[0]["amount"] != 93.0 {
			t.Errorf("answer %s, %v", answer, err)
		}
	}
	if got := amount(t, there); got != 93 {
		t.Errorf("the account has %d", got)
	}
	_, err := r.Invoke(t.Context(), skills.Call{Skill: s, Args: json.RawMessage(`{"n": 8}`), IdempotencyKey: "k1"})
	if class(err) != skills.ClassRefused {
		t.Errorf("another call under the key: %v", err)
	}
	for range 2 { // without a key each call is one
		if _, err := r.Invoke(t.Context(), skills.Call{Skill: s, Args: json.RawMessage(`{"n": 1}`)}); err != nil {
			t.Fatal(err)
		}
	}
	if got := amount(t, there); got != 91 {
		t.Errorf("the account has %d", got)
	}
}

func TestAWriteThatFailsLeavesNothingAndMayBeMadeAgain(t *testing.T) {
	t.Parallel()
	r, there := shop(t, "")
	call := func(query string) error {
		_, err := r.Invoke(t.Context(), skills.Call{
			Skill: pay(t, query, nil), Args: json.RawMessage(`{"n": 1}`), IdempotencyKey: "k2",
		})
		return err
	}
	for name, query := range map[string]string{
		"divides by zero": `with x as (select pg_advisory_lock(7))
			update account set amount = amount / (@n - 1) from x`,
		"no such table":    `insert into nowhere values (@n)`,
		"two statements":   `update account set amount = @n; select 1`,
		"a transaction":    `commit --@n`,
		"returns too much": `update account set amount = amount - @n returning repeat('x', 300000) as x`,
	} {
		if err := call(query); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	var held int
	err := there.QueryRow(t.Context(), `
		select (select count(*) from pg_locks where locktype = 'advisory' and database = (
		         select oid from pg_database where datname = current_database()))
		     + (select count(*) from agent_effects)`).Scan(&held)
	if got := amount(t, there); got != 100 || held != 0 || err != nil {
		t.Errorf("the account has %d, %d locks and effects are left, %v", got, held, err)
	}
	if err := call(payQuery); err != nil || amount(t, there) != 99 {
		t.Errorf("made again: %d, %v", amount(t, there), err)
	}
}

func TestAWritingSkillAnswersWithRowsOrTheirNumber(t *testing.T) {
	t.Parallel()
	r, there := shop(t, "")
	if _, err := there.Exec(t.Context(), `
		create function book(n int) returns int language sql as
		'update account set amount = amount - n where id = 1 returning amount'`); err != nil {
		t.Fatal(err)
	}
	for query, want := range map[string]string{
		`update account set amount = amount + @n - @n where id = 1`: `{"rows":[],"row_count":1,"truncated":false}`,
		`select book(@n * 0) as left from generate_series(1, 3)`: `
			{"rows":[{"left":100},{"left":100}],"row_count":2,"truncated":true}`,
		`insert into account select @n, x from generate_series(2,4) x returning amount`: `
			{"rows":[{"amount":2},{"amount":3}],"row_count":2,"truncated":true}`,
	} {
		raw, err := r.Invoke(t.Context(), skills.Call{
			Skill: pay(t, query, map[string]any{"row_limit": 2}), Args: json.RawMessage(`{"n": 5}`),
		})
		var got, wanted any
		if err == nil {
			err = errors.Join(json.Unmarshal(raw, &got), json.Unmarshal([]byte(want), &wanted))
		}
		if a, b := compact(t, got), compact(t, wanted); err != nil || a != b {
			t.Errorf("%s: %s, %v, want %s", query, a, err, b)
		}
	}
}

func compact(t *testing.T, value any) string {
	t.Helper()
	raw, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestANamedDatabaseIsReadOnlyUnlessItSaysOtherwise(t *testing.T) {
	t.Parallel()
	r, there := shop(t, "")
	call := func(query string, config map[string]any) error {
		_, err := r.Invoke(t.Context(), skills.Call{Skill: pay(t, query, config), Args: json.RawMessage(`{"n": 5}`)})
		return err
	}
	if err := call(payQuery, map[string]any{"database": "read"}); class(err) != skills.ClassConfiguration {
		t.Errorf("a writing skill: %v", err)
	}
	if err := call(payQuery, map[string]any{"writes": false}); class(err) != skills.ClassSQL {
		t.Errorf("an update in a skill that reads: %v", err)
	}
	err := call(payQuery, map[string]any{"database": "SHOP"})
	if class(err) != skills.ClassConfiguration || err.Error() != "set SHOP_URL" {
		t.Errorf("without the setting: %v", err)
	}
	sneaks := `select setval('s', @n)`
	if _, err := there.Exec(t.Context(), `create sequence s`); err != nil {
		t.Fatal(err)
	}
	err = call(sneaks, map[string]any{"writes": false})
	if class(err) != skills.ClassSQL || !strings.Contains(err.Error(), "read-only") {
		t.Errorf("a function that writes: %v", err)
	}
}

func TestQueriesOfANamedDatabaseRunAsItsRole(t *testing.T) {
	t.Parallel()
	const role = "lanekeeper_test_reader"
	r, there := shop(t, role)
	if _, err := there.Exec(t.Context(), `
		do $$ begin create role `+role+`; exception when duplicate_object or unique_violation then null; end $$;
		grant select on account to `+role); err != nil {
		t.Fatal(err)
	}
	who := pay(t, `select current_user as who from account where id = @n`, map[string]any{"writes": false})
	raw, err := r.Invoke(t.Context(), skills.Call{Skill: who, Args: json.RawMessage(`{"n": 1}`)})
	if err != nil || !strings.Contains(string(raw), role) {
		t.Errorf("it runs as %s, %v", raw, err)
	}
	_, err = r.Invoke(t.Context(), skills.Call{Skill: pay(t, payQuery, nil), Args: json.RawMessage(`{"n": 1}`)})
	if class(err) != skills.ClassSQL || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("a write that the role may not make: %v", err)
	}
	if _, err := there.Exec(t.Context(), `grant update on account to `+role); err != nil {
		t.Fatal(err)
	}
	_, err = r.Invoke(t.Context(), skills.Call{Skill: pay(t, payQuery, nil), Args: json.RawMessage(`{"n": 1}`)})
	if err != nil {
		t.Error(err)
	}
}
