//go:build unix

package lanecheck_test

import (
	"os"
	"testing"
)

func TestReplay(t *testing.T) {
	path := os.Getenv("LANECHECK_HISTORY")
	if path == "" {
		return
	}
	byLane, err := read([]string{path})
	if err != nil {
		t.Fatal(err)
	}
	checkAll(t, byLane)
}
