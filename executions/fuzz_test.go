package executions_test

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/trace"
)

// FuzzTextOfARun has code say any text, and raw JSON, wherever it may: as result, summary and error, and in the
// activity log. The database can hold neither NUL nor half of a surrogate pair, so that what is stored may be mended; but the
// run ends as its code said, and its step has the same result when it is read again.
func FuzzTextOfARun(f *testing.F) {
	pool := pgtest.DB(f)
	e, err := executions.New(pool, executions.Options{Keeper: lanes.NewKeeper(pool, lanes.Options{})})
	if err != nil {
		f.Fatal(err)
	}
	var text, raw string
	var kept any
	err = e.Register("says", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		said, err := executions.Step(ctx, "text", func(context.Context) (map[string]string, error) {
			return map[string]string{"a": text, text: "b"}, nil
		})
		if err != nil {
			return executions.Result{}, err
		}
		kept = said
		_, failure := executions.Do(ctx, "call", executions.Call{Entry: activity.Entry{Skill: "call", Input: text}},
			func(context.Context, *executions.Effect) (json.RawMessage, error) {
				if json.Valid([]byte(raw)) {
					return json.RawMessage(raw), nil
				}
				return nil, errors.New(raw)
			})
		if executions.IsControl(failure) {
			return executions.Result{}, failure
		}
		return executions.Result{Summary: text, Value: []any{said, raw}}, nil
	})
	if err != nil {
		f.Fatal(err)
	}
	for _, s := range []string{
		"", "a", "\x00", `"\u0000"`, `"\ud800"`, `["\udc00\ud800", "\ud83d\ude00"]`, "\xff", "\xed\xa0\x80", `1e400`, `{"a\u0000": 1, "a\ufffd": 2}`, `{"\ud800": "\uD800"}`,
		`-0.0`, `1E-7000`, strings.Repeat("[", 7000) + strings.Repeat("]", 7000), `"\\u0000"`, `"\\\u0000"`, `123456789012345678901234567890.5`, "\u2028",
	} {
		f.Add(s, s)
	}
	f.Fuzz(func(t *testing.T, one, two string) {
		text, raw = one, two
		x, err := e.RunNow(t.Context(), executions.Spec{Flow: "says", Surface: trace.Flow})
		if err != nil || x.Status != executions.Completed {
			t.Fatalf("%q and %q: %s %s, %v", one, two, x.Status, str(x.ErrorMessage), err)
		}
		if !utf8.ValidString(x.ResultSummary) {
			t.Errorf("the summary of %q is %q", one, x.ResultSummary)
		}
		for _, c := range recordedOf(t, pool, x.ID) {
			if c.Step != "text" {
				continue
			}
			var again map[string]string
			if err := json.Unmarshal(c.Output, &again); err != nil {
				t.Fatal(err)
			}
			for name, v := range kept.(map[string]string) {
				if again[name] != v {
					t.Errorf("%q: the code got %q, and a later run would get %q", one, kept, again)
				}
			}
		}
	})
}

// recordedOf are the records of an execution.
func recordedOf(t *testing.T, db postgres.DB, id string) []executions.Checkpoint {
	t.Helper()
	got, err := executions.Checkpoints(t.Context(), db, id)
	if err != nil {
		t.Fatal(err)
	}
	return got
}
