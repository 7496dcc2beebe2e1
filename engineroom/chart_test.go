package engineroom

import (
	"strings"
	"testing"
)

func TestAChartIsDrawnToScaleWithItsNumbersBeside(t *testing.T) {
	t.Parallel()
	c := chart{
		Title: "Calls", About: "What was called.", Series: []series{{"good", "bar-good"}, {"bad", "bar-bad"}}, Write: countTick,
		Points: []point{{"Monday", "Mo", []float64{30, 0}}, {"Tuesday", "Tu", []float64{0, 0}}, {"<Wednesday>", "We", []float64{10, 70}}},
	}
	if step := c.step(); step != 20 {
		t.Errorf("a highest bar of 80 has ticks every %v, want 20", step)
	}
	bars := c.Bars()
	if len(bars) != 3 || bars[2].Y != "8" || bars[1].Text != "<Wednesday>: 10 good" {
		t.Errorf("bars %+v: want three, the highest from the top", bars)
	}
	if ticks := c.Ticks(); len(ticks) != 5 || ticks[4].Text != "80" {
		t.Errorf("ticks %+v", ticks)
	}
	if rows := c.Rows(); rows[0][2] != "70" || rows[2][0] != "Monday" {
		t.Errorf("rows %v", rows)
	}
	body := drawn(t, c)
	for _, want := range []string{`role="img"`, `class="bar-bad"`, "&lt;Wednesday&gt;: 70 bad", `<th scope="row">Tuesday</th>`} {
		if !strings.Contains(body, want) {
			t.Errorf("the chart lacks %s:\n%s", want, body)
		}
	}
	if strings.Contains(body, "style=") {
		t.Error("the chart has a style attribute, which the policy forbids")
	}
}

// drawn is a chart as HTML.
func drawn(t *testing.T, c chart) string {
	t.Helper()
	parsed, err := parseTemplates()
	if err != nil {
		t.Fatal(err)
	}
	room := &Room{templates: parsed}
	body, err := room.execute("chart", c)
	if err != nil {
		t.Fatal(err)
	}
	return string(body)
}

func TestAChartOfNothingIsEmpty(t *testing.T) {
	t.Parallel()
	c := chart{Series: []series{{"x", "bar-accent"}}, Points: []point{{"a", "a", []float64{0}}}, Write: moneyTick}
	if !c.Empty() || len(c.Bars()) != 0 {
		t.Error("a chart without values has bars")
	}
	for v, want := range map[float64]string{0: "$0", 0.0123: "$0.0123", 2.5: "$2.50", 20: "$20"} {
		if got := moneyTick(v); got != want {
			t.Errorf("%v is %s, want %s", v, got, want)
		}
	}
	for v, want := range map[float64]string{950: "950", 9999: "9999", 15_000: "15k", 2_500_000: "2.5M", 3e9: "3G"} {
		if got := countTick(v); got != want {
			t.Errorf("%v is %s, want %s", v, got, want)
		}
	}
}
