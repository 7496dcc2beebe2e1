package api

import (
	"encoding/json"
	"testing"
	"time"
)

// TestReadDuration tests that a positive field never means 0, the value of an absent field.
func TestReadDuration(t *testing.T) {
	for raw, want := range map[string]time.Duration{
		``: 0, `null`: 0, `60`: time.Minute, `0.5`: time.Second / 2, `1e-12`: 1,
		`"90m"`: 90 * time.Minute, `"7d"`: 7 * 24 * time.Hour, `"0.5d"`: 12 * time.Hour, `"1e-20d"`: 1,
	} {
		if got, err := readDuration("expires_in", json.RawMessage(raw)); got != want || err != nil {
			t.Errorf("%s: got %v and %v, want %v", raw, got, err, want)
		}
	}
	for _, raw := range []string{
		`0`, `-1`, `1e10`, `true`, `"soon"`, `""`, `"0"`, `"0d"`, `"-1d"`, `"NaNd"`, `"20000d"`, `"-1m"`, `"0.1ns"`,
	} {
		if got, err := readDuration("expires_in", json.RawMessage(raw)); err == nil {
			t.Errorf("%s: got %v, want an error", raw, got)
		}
	}
}
