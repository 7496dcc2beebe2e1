package workspace_test

import (
	"testing"
)

func TestUnknownBuiltinsAreRefused(t *testing.T) {
	t.Parallel()
	w := load(t, "a.yaml", good+"---\nkind: skill\nname: b\nhandler: builtin:recal\n---\nkind: skill\nname: c\nhandler: 'builtin: recall'\n",
		"b.yaml", "kind: skill\nname: d\nhandler: builtin:weather_of_the_week\n")
	want := `a.yaml:7:10: handler: unknown builtin "recal"; did you mean "recall"?` + "\n" +
		`b.yaml:3:10: handler: unknown builtin "weather_of_the_week"; known are objectives_list, recall`
	if err := w.CheckBuiltins([]string{"recall", "objectives_list"}); err == nil || err.Error() != want {
		t.Errorf("got\n%v\nnot\n%s", err, want)
	}
	if err := w.CheckBuiltins([]string{"recall", "recal", "weather_of_the_week"}); err != nil {
		t.Error(err)
	}
}
