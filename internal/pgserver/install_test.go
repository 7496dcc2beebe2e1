package pgserver

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestDebianCreatesNoCluster(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]string{
		"none":      "",
		"commented": "# Create a \"main\" cluster\n#create_main_cluster = true\n#start_conf = 'auto'\n",
		"set":       "create_main_cluster = true\n",
	} {
		t.Run(name, func(t *testing.T) {
			got := string(withoutMainCluster([]byte(before)))
			assert.Equal(t, 1, strings.Count(got, "create_main_cluster"), got)
			assert.Contains(t, "\n"+got, "\ncreate_main_cluster = false\n")
		})
	}
}
