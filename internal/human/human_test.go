package human

import (
	"encoding/json"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Package engineroom tests the browser's formatter with the same examples.
func TestExamples(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/examples.json")
	require.NoError(t, err)
	var examples map[string][][2]any
	require.NoError(t, json.Unmarshal(text, &examples))
	ms := func(f func(time.Duration) string) func(float64) string {
		return func(x float64) string { return f(time.Duration(x) * time.Millisecond) }
	}
	whole := func(f func(int64) string) func(float64) string {
		return func(x float64) string { return f(int64(x)) }
	}
	formatters := map[string]func(float64) string{
		"money": Money, "count": whole(Count), "bytes": whole(Bytes), "percent": Percent, "duration": ms(Duration),
	}
	for name, format := range formatters {
		assert.Truef(t, len(examples[name]) > 0, "%s has no examples", name)
		for _, e := range examples[name] {
			assert.Equal(t, e[1].(string), format(e[0].(float64)), name, e[0])
		}
	}
}

func TestCutCountsOmittedCharacters(t *testing.T) {
	t.Parallel()
	text := strings.Repeat("é", 100)
	assert.Equal(t, strings.Repeat("é", 70)+"… (30 more characters)", Cut(70, text))
	for _, n := range []int{100, 90, 78} {
		assert.Equal(t, text, Cut(n, text), n, "the note would be as long as the omitted text")
	}
}

func TestEdgeCases(t *testing.T) {
	t.Parallel()
	for got, want := range map[string]string{
		Count(math.MaxInt64): "9,223,372,036,854,775,807", Count(math.MinInt64): "-9,223,372,036,854,775,808",
		Duration(time.Microsecond): "<1 ms", Duration(math.MinInt64): "0 ms", Money(math.NaN()): "–",
		Counted(1, "call"): "1 call", Counted(0, "call"): "0 calls", Counted(2000, "call"): "2,000 calls",
		Millis(math.MaxInt64): "106,751 d 23 h", Seconds(61.5): "1 min 1 s", Seconds(math.NaN()): "0 ms",
	} {
		assert.Equal(t, want, got)
	}
}
