package main

import (
	"bytes"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestTheSetIsReproducible(t *testing.T) {
	t.Parallel()
	var made bytes.Buffer
	require.NoError(t, write(&made))
	kept, err := os.ReadFile("../faults.jsonl")
	require.NoError(t, err)
	assert.True(t, bytes.Equal(made.Bytes(), kept),
		"the set differs: go run ./selfheal/faults/gen > selfheal/faults/faults.jsonl")
}

func TestTheGeneratorKnowsNoRule(t *testing.T) {
	t.Parallel()
	file, err := parser.ParseFile(token.NewFileSet(), "main.go", nil, parser.ImportsOnly)
	require.NoError(t, err)
	for _, i := range file.Imports {
		assert.Truef(t, !strings.Contains(i.Path.Value, "lanekeeper"), "it imports %s", i.Path.Value)
	}
}
