package engineroom

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestChartScaleAndTable(t *testing.T) {
	t.Parallel()
	c := chart{
		Title: "Calls", About: "What was called.", Series: []series{{"good", "bar-good"}, {"bad", "bar-bad"}},
		Write: countTick,
		Points: []point{
			{"Monday", "Mo", []float64{30, 0}},
			{"Tuesday", "Tu", []float64{0, 0}},
			{"<Wednesday>", "We", []float64{10, 70}},
		},
	}
	assert.Equal(t, 20, c.step())
	bars := c.Bars()
	assert.Truef(t, len(bars) == 3 && bars[2].Y == "8" && bars[1].Text == "<Wednesday>: 10 good",
		"bars %+v: want three, the highest from the top", bars)
	ticks := c.Ticks()
	assert.Truef(t, len(ticks) == 5 && ticks[4].Text == "80", "ticks %+v", ticks)
	rows := c.Rows()
	assert.Truef(t, rows[0][2] == "70" && rows[2][0] == "Monday", "rows %v", rows)
	body := renderChart(t, c)
	assert.Contains(t, body, `role="img"`, `class="bar-bad"`, "&lt;Wednesday&gt;: 70 bad", `<th scope="row">Tuesday</th>`)
	assert.True(t, !strings.Contains(body, "style="), "the chart has a style attribute, which the policy forbids")
}

// renderChart returns a chart as HTML.
func renderChart(t *testing.T, c chart) string {
	t.Helper()
	parsed, err := parseTemplates()
	require.NoError(t, err)
	room := &Room{templates: parsed}
	body, err := room.execute("chart", c)
	require.NoError(t, err)
	return string(body)
}

func TestEmptyChart(t *testing.T) {
	t.Parallel()
	c := chart{Series: []series{{"x", "bar-accent"}}, Points: []point{{"a", "a", []float64{0}}}, Write: moneyTick}
	assert.True(t, c.Empty() && len(c.Bars()) == 0, "a chart without values has bars")
	for v, want := range map[float64]string{
		0: "$0.00", 0.00002: "$0.000020", 0.0123: "$0.0123", 2.5: "$2.50", 20: "$20.00",
	} {
		assert.Equal(t, want, moneyTick(v), v)
	}
	for v, want := range map[float64]string{950: "950", 9999: "9999", 15_000: "15k", 2_500_000: "2.5M", 3e9: "3G"} {
		assert.Equal(t, want, countTick(v), v)
	}
}
