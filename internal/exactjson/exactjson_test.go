package exactjson_test

import (
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestYAMLKeepsEveryCharacter(t *testing.T) {
	t.Parallel()
	want := map[string]string{"a": "\x00 \x7f \u0080 \u0085 \u009f \u2028 \ufeff \uffff 😀 \\u007f", "b\x7f": "<<"}
	text, err := exactjson.YAML(want)
	require.NoError(t, err)
	got := map[string]string{}
	require.NoError(t, yaml.Unmarshal(text, &got))
	assert.NoDiff(t, want, got)
}

func TestEqualComparesExactNumbers(t *testing.T) {
	t.Parallel()
	for other, want := range map[string]bool{
		`{"b":null, "a":[9007199254740993e0]}`: true, `{"a":[9007199254740992],"b":null}`: false, "": false,
	} {
		assert.Equal(t, want, exactjson.Equal([]byte(`{"a":[9007199254740993],"b":null}`), []byte(other)), other)
	}
}
