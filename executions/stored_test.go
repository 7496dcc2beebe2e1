package executions_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"math"
	"testing"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// A step that gives JSON as it came, from a request say, gives the same in every run, so that it can be the input of the next step.
func TestJSONThatIsAStepsResultIsTheSameInEveryRun(t *testing.T) {
	t.Parallel()
	type answer struct {
		Code int
		Body json.RawMessage
	}
	const body = `{"price": 1.5e-7, "a": [1,2], "name":"\u00e9 <b>", "a": 1}`
	var seen []json.RawMessage
	got, _ := replayed(t, func(ctx context.Context, _ bool) (any, error) {
		plain, err := executions.Step(ctx, "plain", func(context.Context) (json.RawMessage, error) { return json.RawMessage(body), nil })
		if err != nil {
			return nil, err
		}
		within, err := executions.Step(ctx, "within", func(context.Context) ([]*answer, error) {
			return []*answer{{Code: 200, Body: json.RawMessage(body)}}, nil
		})
		if err != nil {
			return nil, err
		}
		seen = append(seen, plain, within[0].Body)
		return executions.Do(ctx, "send", executions.Call{Entry: activity.Entry{Skill: "send", Input: []any{plain, within[0].Body}}},
			func(context.Context, *executions.Effect) (int, error) { return 1, nil })
	})
	if got.Status != executions.Completed {
		t.Errorf("the run is %s: %s", got.Status, *got.ErrorMessage)
	}
	for _, text := range seen[1:] {
		if !bytes.Equal(text, seen[0]) {
			t.Errorf("%s\nand first %s", text, seen[0])
		}
	}
}

// What is given to the first run is what the database gives to the others, to the byte.
func TestJSONIsWrittenAsTheDatabaseWritesIt(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	for _, text := range []string{
		`{}`, `[]`, `null`, ` [ true , false,null ] `, `"a\"\\\/\b\f\n\r\t\u0001\u001f\u007f\u2028é\ud83d\ude00<>&'"`,
		`{"bb":1,"a":{"é":[],"zz":{}},"":0,"a":2}`, `[0,-0,0.0,-0.00,1.50,-1.50,10,100.00,12345678901234567890.123456789]`,
		`[1e0,1E2,1e+2,1.5e-7,-1.50e1,1.5e3,0e5,-0e5,0.0e-3,1e21,1e-20,12.345e2,12.345e4,1e400,1.7976931348623157e308,5e-324]`,
	} {
		want := value[string](t, pool, `select (@text::text)::jsonb::text`, postgres.Strict{"text": text})
		if got, err := executions.AsStored(json.RawMessage(text)); err != nil || string(got) != want {
			t.Errorf("%s\nis  %s (%v)\nnot %s", text, got, err, want)
		}
	}
}

// jsonb has no zero below zero, which is what rounding a small negative number gives.
func TestAZeroWithASignIsTheSameInEveryRun(t *testing.T) {
	t.Parallel()
	type rounded struct {
		Text  string
		Value float64 `json:"-0"`
		More  []any
	}
	got, _ := replayed(t, func(ctx context.Context, _ bool) (any, error) {
		v, err := executions.Step(ctx, "round", func(context.Context) (rounded, error) {
			zero := math.Round(-0.3)
			return rounded{Text: `-0, "-0" \`, Value: zero, More: []any{zero, -0.5, 1e-07, -1e-07, "-0", json.Number("-0.0")}}, nil
		})
		if err != nil {
			return nil, err
		}
		if math.Signbit(v.Value) {
			return nil, errors.New("it has a sign")
		}
		return executions.Step(ctx, "use", func(context.Context) (rounded, error) { return v, nil }, executions.Input(v))
	})
	if want := `{"-0": 0, "More": [0, -0.5, 0.0000001, -0.0000001, "-0", 0], "Text": "-0, \"-0\" \\"}`; string(got.Result) != want {
		t.Errorf("%s: %s\nnot %s", got.Status, got.Result, want)
	}
}
