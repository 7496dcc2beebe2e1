package pgserver

import (
	"os/exec"
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

func TestFailedInstallReportsEndOfOutput(t *testing.T) {
	t.Parallel()
	cmd := exec.Command("sh", "-c", "head -c 70000 /dev/zero | tr '\\0' x; echo; echo no space left; exit 1")
	err := runReporting(cmd, func(string) {}, "apt-get install")
	assert.ErrorContains(t, err, "no space left")
}
