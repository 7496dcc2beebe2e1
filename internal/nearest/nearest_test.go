package nearest_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

func ExampleTo() {
	fmt.Println(nearest.To("send_emial", []string{"send_mail", "send_email", "read_email"}))
	// Output: send_email
}

func TestTo(t *testing.T) {
	known := []string{"table_sizes", "recall", "AGENT_LISTEN"}
	for name, test := range map[string]struct{ word, want string }{
		"letters swapped":      {"tabel_sizes", "table_sizes"},
		"one left out":         {"recal", "recall"},
		"another letter case":  {"agent_lisen", "AGENT_LISTEN"},
		"only the beginning":   {"table", "table_sizes"},
		"too far for a guess":  {"send_sms", ""},
		"too short for a slip": {"x", ""},
		"nothing":              {"", ""},
		"too long to be meant": {strings.Repeat("recall", 20), ""},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.want, nearest.To(test.word, known), test.word)
		})
	}
}
