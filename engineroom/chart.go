package engineroom

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// The measures of a chart, in the units of its viewBox.
const (
	chartWide, chartHigh   = 640.0, 180.0
	chartLeft, chartBottom = 56.0, 22.0
	chartTop               = 8.0
	chartTicks             = 4
	// mostLabels is how many words fit below a chart.
	mostLabels = 8
)

// point is what a chart shows at one place: the values that are stacked there.
type point struct {
	Name   string // in the data table
	Short  string // below the chart
	Values []float64
}

// series is what the values of all points at one index mean.
type series struct{ Name, Class string }

// chart is bars, drawn on the server, and the table with the same numbers that stands beside it.
type chart struct {
	Title, About string
	Series       []series
	Points       []point
	Write        func(float64) string // a value in words
}

// bar is a piece of a bar.
type bar struct{ X, Y, W, H, Class, Text string }

// mark is a word at an axis.
type mark struct{ X, Y, Text string }

// place is a number as SVG has it.
func place(f float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.1f", f), "0"), ".")
}

// Empty reports whether there is nothing to draw.
func (c chart) Empty() bool {
	for _, p := range c.Points {
		if p.sum() > 0 {
			return false
		}
	}
	return true
}

func (p point) sum() (sum float64) {
	for _, v := range p.Values {
		sum += v
	}
	return sum
}

// step is the distance of two ticks: 1, 2 or 5 times a power of ten, so that at most chartTicks reach the highest bar.
func (c chart) step() float64 {
	most := 0.0
	for _, p := range c.Points {
		most = max(most, p.sum())
	}
	if most <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(most/chartTicks)))
	for _, factor := range []float64{1, 2, 5} {
		if factor*power*chartTicks >= most {
			return factor * power
		}
	}
	return 10 * power
}

// height is how high a value is drawn.
func (c chart) height(v float64) float64 {
	return v / (c.step() * chartTicks) * (chartHigh - chartTop - chartBottom)
}

// Bars are the pieces of all bars.
func (c chart) Bars() []bar {
	list := []bar{}
	wide := (chartWide - chartLeft) / float64(max(len(c.Points), 1))
	for i, p := range c.Points {
		base := chartHigh - chartBottom
		for s, v := range p.Values {
			high := c.height(v)
			if high <= 0 {
				continue
			}
			base -= high
			list = append(list, bar{
				X: place(chartLeft + wide*(float64(i)+.1)), Y: place(base), W: place(wide * .8), H: place(max(high, .5)),
				Class: c.Series[s].Class, Text: fmt.Sprintf("%s: %s %s", p.Name, c.Write(v), c.Series[s].Name),
			})
		}
	}
	return list
}

// Ticks are the words at the left, with the lines that belong to them.
func (c chart) Ticks() []mark {
	list := []mark{}
	for i := range chartTicks + 1 {
		v := c.step() * float64(i)
		list = append(list, mark{X: place(chartLeft - 6), Y: place(chartHigh - chartBottom - c.height(v)), Text: c.Write(v)})
	}
	return list
}

// Labels are the words below, as many as fit.
func (c chart) Labels() []mark {
	list := []mark{}
	wide := (chartWide - chartLeft) / float64(max(len(c.Points), 1))
	every := (len(c.Points) + mostLabels - 1) / mostLabels
	for i, p := range c.Points {
		if i%every == 0 {
			list = append(list, mark{X: place(chartLeft + wide*(float64(i)+.5)), Y: place(chartHigh - 5), Text: p.Short})
		}
	}
	return list
}

// Box is the viewBox; Left and Right are where lines begin and end.
func (c chart) Box() string   { return fmt.Sprintf("0 0 %s %s", place(chartWide), place(chartHigh)) }
func (c chart) Left() string  { return place(chartLeft) }
func (c chart) Right() string { return place(chartWide) }

// Rows are the points with all values in words, the latest first.
func (c chart) Rows() [][]string {
	list := [][]string{}
	for _, p := range slices.Backward(c.Points) {
		row := []string{p.Name}
		for _, v := range p.Values {
			row = append(row, c.Write(v))
		}
		list = append(list, row)
	}
	return list
}
