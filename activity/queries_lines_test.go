package activity_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// walk reads all pages of a listing.
func walk(t *testing.T, db postgres.DB, f activity.Filter) (ids []string, pages, partial int) {
	t.Helper()
	for {
		got, err := activity.Lines(t.Context(), db, f)
		if err != nil {
			t.Fatal(err)
		}
		pages++
		if got.Partial {
			partial++
		}
		for _, line := range got.Lines {
			ids = append(ids, line.ID)
		}
		if got.Next == "" {
			return ids, pages, partial
		}
		f.Cursor = got.Next
	}
}

func TestLinesLookAtAWindowAndGoOnBehindIt(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	fill(t, db)
	_, err := db.Exec(t.Context(), `
		update agent_activity set agent = 'rare' where id in (
		  (select id from agent_activity order by id limit 2) union all (select id from agent_activity order by id desc limit 1))`)
	if err != nil {
		t.Fatal(err)
	}
	ids, pages, partial := walk(t, db, activity.Filter{Agent: "rare"})
	if len(ids) != 3 || pages != 3 || partial != 2 {
		t.Errorf("found %d on %d pages, %d of them partial; want 3 on 3, 2", len(ids), pages, partial)
	}
	if ids, pages, _ = walk(t, db, activity.Filter{Agent: "nobody"}); len(ids) != 0 || pages != 3 {
		t.Errorf("found %d on %d pages, want none on 3", len(ids), pages)
	}
	if ids, _, partial = walk(t, db, activity.Filter{Limit: 500}); len(ids) != 24_000 || partial != 0 {
		t.Errorf("found %d, %d partial; want all and none", len(ids), partial)
	}
	seen := map[string]bool{}
	if ids, _, _ = walk(t, db, activity.Filter{Surface: "chat", Limit: 500}); len(ids) != 4800 {
		t.Errorf("found %d of chat, want 4800", len(ids))
	}
	for i, id := range ids {
		if seen[id] || i > 0 && id > ids[i-1] {
			t.Fatalf("%s comes twice or out of order", id)
		}
		seen[id] = true
	}
}

func TestLinesAndUnfoldCutInTheDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	var id string
	err := db.QueryRow(t.Context(), `
		insert into agent_activity (trace_id, skill_name, purpose, lane, input, output, error_message, token_usage)
		values ('hb_00000000000000000000000001', 'look', repeat('p', 1000000), repeat('l', 1000000), to_jsonb(repeat('i', 1000000)),
		        to_jsonb(repeat('o', 1000000)), repeat('e', 1000000), '{"total_tokens": "many", "prompt_tokens": 1e30, "completion_tokens": 7}')
		returning id::text`).Scan(&id)
	if err != nil {
		t.Fatal(err)
	}
	got, err := activity.Lines(t.Context(), db, activity.Filter{})
	if err != nil || len(got.Lines) != 1 {
		t.Fatalf("%+v, %v", got, err)
	}
	if line := got.Lines[0]; len(line.Purpose) != 300 || len(line.Lane) != 300 || len(line.ErrorMessage) != 300 || line.Tokens != 0 {
		t.Errorf("purpose %d, lane %d, error %d, tokens %d", len(line.Purpose), len(line.Lane), len(line.ErrorMessage), line.Tokens)
	}
	more, err := activity.Unfold(t.Context(), db, id)
	if err != nil || len(more.Input) != 4000 || more.InputSize != 1000002 || len(more.Output) != 4000 || more.ErrorSize != 1000000 ||
		more.PromptTokens != 1e12 || more.AnswerTokens != 7 {
		t.Errorf("got %.200s, %v", strings.Join([]string{more.Input, more.Output}, " "), err)
	}
	for _, none := range []string{"", "x", "018f0000-0000-7000-8000-000000000000"} {
		if _, err := activity.Unfold(t.Context(), db, none); !errors.Is(err, activity.ErrNoRow) {
			t.Errorf("%q: %v", none, err)
		}
	}
}
