package main

import (
	"bytes"
	"io"
	"regexp"
	"testing"
)

// TestWhyMeasures runs the whole of it on a small log.
func TestWhyMeasures(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), []string{"why", "-rows=2000", "-traces=5"}, &out, io.Discard); err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{`floor: one row by an index \| 5 \| \d`, "`select \\* from why\\(trace\\)` \\| 5 \\| \\d", "`agent why ID`.* \\| 5 \\| ", `by all of them: \d+\.`} {
		if !regexp.MustCompile(row).MatchString(out.String()) {
			t.Errorf("there is no %q in\n%s", row, out.String())
		}
	}
}
