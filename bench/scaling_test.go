package main

import (
	"bytes"
	"io"
	"math"
	"regexp"
	"testing"
)

func TestAPredictionIsOnTheLineThroughTwoMeasurements(t *testing.T) {
	for _, c := range []struct{ x1, y1, x2, y2, x, want float64 }{
		{1, 10, 16, 40, 64, 136},
		{1, 10, 1, 12, 64, 12}, // one point: nothing grows
	} {
		if got := predicted(c.x1, c.y1, c.x2, c.y2, c.x); math.Abs(got-c.want) > 1e-9 {
			t.Errorf("through (%v, %v) and (%v, %v), at %v: %v, want %v", c.x1, c.y1, c.x2, c.y2, c.x, got, c.want)
		}
	}
	if over, under, none := off(120, 100), off(80, 100), off(1, 0); over != "+20 %" || under != "-20 %" || none != "" {
		t.Errorf("off by %q, %q and %q", over, under, none)
	}
}

// TestScalingMeasures runs the whole of it, briefly and on few rows: nothing else would notice that it no longer runs.
func TestScalingMeasures(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	err := run(t.Context(), []string{
		"scaling", "-rows=2000", "-waiting=200", "-threads=100", "-visits=1",
		"-processes=4", "-idle=100ms", "-for=50ms", "-backlog=20", "-watched=0s",
	}, &out, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{
		`a row of the activity log \| 200 \| [1-9]\d* \| [1-9]\d* \| 0 \| [1-9]\d* \| 2000 \| \d`,
		`an execution that waits \| 20 \| [1-9]`, `a thread with ten messages \| 10 \| [1-9]`,
		`of one step that has ended \| 10 \| .* \| 20 \|`, `by processes \| 1 \| 1 \| 2 \| 4 \| 4 predicted`,
		`connections \| [1-9]\d* \| [1-9]\d* \| [1-9]\d* \| [1-9]\d* \|`, `20 executions at once: µs \| [1-9]`,
		`an event, .* has ended \| [1-9]\d* \| [1-9]`, "a visit to `/threads` \\| ",
	} {
		if !regexp.MustCompile(row).MatchString(out.String()) {
			t.Errorf("there is no %q in\n%s", row, out.String())
		}
	}
}
