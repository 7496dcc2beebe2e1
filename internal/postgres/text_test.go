package postgres_test

import (
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

func TestTextIsWhatAColumnCanHold(t *testing.T) {
	t.Parallel()
	tests := map[string]struct{ text, want string }{
		"nothing":      {"", ""},
		"as it is":     {"día\n\u2028", "día\n\u2028"},
		"a NUL":        {"a\x00b\x00", "ab"},
		"no UTF-8":     {"a\xff\xfeb\xc3", "a\ufffdb\ufffd"},
		"one by a NUL": {"\xe2\x82\x00\xac", "\ufffd\ufffd"},
	}
	for name, test := range tests {
		assert.Equal(t, test.want, postgres.Text(test.text), name)
	}
}
