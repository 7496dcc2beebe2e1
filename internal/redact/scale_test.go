package redact_test

import (
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/redact"
)

// A text of many beginnings takes time in proportion to its length: a tenth of a second each, where a search from each
// beginning to the end would take minutes.
func TestTheWorkGrowsWithTheTextAndNoFaster(t *testing.T) {
	const size, most = 512 << 10, 20 * time.Second
	for _, beginning := range []string{
		"<password>", "x<secret></a>", "</password", "curl -u ", "curl ", "mysql -p ", "password: |\n", "password:\n",
		"key=", "é:", "密码:", "postgres://", "http://a:b@", "redis://x@", "-----BEGIN PRIVATE", "Private-Lines:",
		"a.bcdefg.", "eyJaaaaa.", "1234567:AA", "mot de passe ", "hvs.",
	} {
		text := strings.Repeat(beginning, size/len(beginning))
		started := time.Now()
		redact.Text(text, 1000)
		if took := time.Since(started); took > most {
			t.Errorf("%d bytes of %q took %s", len(text), beginning, took)
		}
	}
}
