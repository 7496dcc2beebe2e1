package engineroom

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// Measures of a chart in pixels. Horizontal positions are in per cent of the width, so text keeps its size.
const (
	chartHigh, chartBottom, chartTop = 180.0, 22.0, 8.0
	// chartWide is the width of the coordinates of lines, which the browser stretches.
	chartWide  = 1000.0
	chartTicks = 4
	// maxLabels bounds the labels below a chart.
	maxLabels = 8
)

// point is the stacked values at one place of a chart.
type point struct {
	Name   string // in the data table
	Short  string // below the chart
	Values []float64
}

// series names the values at one index of all points.
type series struct{ Name, Class string }

// chart is a bar chart, drawn on the server, and its data table.
type chart struct {
	Title, About string
	Series       []series
	Points       []point
	Write        func(float64) string // formats a value
	Lines        bool                 // draws a line for each series instead of bars; NaN is a gap
	Tick         float64              // the distance of two ticks; 0 derives it from the highest bar
}

// bar is a rectangle of a chart: one series of one point, or the area of a point.
type bar struct{ X, Y, W, H, Class, Text string }

// mark is a label at an axis.
type mark struct{ X, Y, Text string }

// formatSVG formats a number for SVG.
func formatSVG(f float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.1f", f), "0"), ".")
}

// percentX formats a place or a width across a chart, in per cent.
func percentX(f float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.2f", 100*f/chartWide), "0"), ".") + "%"
}

// Empty reports whether all values are zero.
func (c chart) Empty() bool {
	for _, p := range c.Points {
		if c.top(p) > 0 {
			return false
		}
	}
	return true
}

// top is the highest drawn value of a point: the sum of its bars, or its highest line.
func (c chart) top(p point) (top float64) {
	for _, v := range p.Values {
		switch {
		case !c.Lines:
			top += v
		case v > top: // not NaN
			top = v
		}
	}
	return top
}

// step is the distance of two ticks: 1, 2 or 5 times a power of ten, with at most chartTicks up to the highest bar.
func (c chart) step() float64 {
	if c.Tick > 0 {
		return c.Tick
	}
	highest := 0.0
	for _, p := range c.Points {
		highest = max(highest, c.top(p))
	}
	if highest <= 0 {
		return 1
	}
	power := math.Pow(10, math.Floor(math.Log10(highest/chartTicks)))
	for _, factor := range []float64{1, 2, 5} {
		if factor*power*chartTicks >= highest {
			return factor * power
		}
	}
	return 10 * power
}

// height is the drawn height of a value.
func (c chart) height(v float64) float64 {
	return v / (c.step() * chartTicks) * (chartHigh - chartTop - chartBottom)
}

// chartLine is a drawn series: its pieces between gaps, and a dot for a piece of one point.
type chartLine struct {
	Class  string
	Pieces []string
	Dots   []mark
}

// Paths are the lines of all series.
func (c chart) Paths() []chartLine {
	if !c.Lines {
		return nil
	}
	lines := make([]chartLine, len(c.Series))
	width := chartWide / float64(max(len(c.Points), 1))
	for s := range c.Series {
		lines[s].Class = c.Series[s].Class
		var piece []string
		var last mark
		end := func() {
			if len(piece) == 1 {
				lines[s].Dots = append(lines[s].Dots, last)
			} else if len(piece) > 1 {
				lines[s].Pieces = append(lines[s].Pieces, strings.Join(piece, " "))
			}
			piece = nil
		}
		for i, p := range c.Points {
			if math.IsNaN(p.Values[s]) {
				end()
				continue
			}
			at := width * (float64(i) + .5)
			last = mark{X: percentX(at), Y: formatSVG(chartHigh - chartBottom - c.height(p.Values[s]))}
			piece = append(piece, formatSVG(at)+","+last.Y)
		}
		end()
	}
	return lines
}

// Areas cover one point each, and name the point's values under the reader's pointer.
func (c chart) Areas() []bar {
	if !c.Lines {
		return nil
	}
	list := []bar{}
	width := chartWide / float64(max(len(c.Points), 1))
	for i, p := range c.Points {
		words := []string{p.Name + ":"}
		for s, v := range p.Values {
			words = append(words, c.Series[s].Name, c.Write(v))
		}
		list = append(list, bar{
			X: percentX(width * float64(i)), Y: formatSVG(chartTop), W: percentX(width),
			H:    formatSVG(chartHigh - chartTop - chartBottom),
			Text: strings.Join(words, " "),
		})
	}
	return list
}

// Legend names the series if there are several.
func (c chart) Legend() []series {
	if len(c.Series) < 2 {
		return nil
	}
	return c.Series
}

// Bars are the pieces of all bars.
func (c chart) Bars() []bar {
	list := []bar{}
	if c.Lines {
		return list
	}
	width := chartWide / float64(max(len(c.Points), 1))
	for i, p := range c.Points {
		base := chartHigh - chartBottom
		for s, v := range p.Values {
			height := c.height(v)
			if height <= 0 {
				continue
			}
			base -= height
			list = append(list, bar{
				X: percentX(width * (float64(i) + .1)), Y: formatSVG(base), W: percentX(width * .8), H: formatSVG(max(height, .5)),
				Class: c.Series[s].Class, Text: fmt.Sprintf("%s: %s %s", p.Name, c.Write(v), c.Series[s].Name),
			})
		}
	}
	return list
}

// Ticks are the labels at the left, with their lines.
func (c chart) Ticks() []mark {
	list := []mark{}
	for i := range chartTicks + 1 {
		v := c.step() * float64(i)
		list = append(list, mark{Y: formatSVG(chartHigh - chartBottom - c.height(v)), Text: c.Write(v)})
	}
	return list
}

// Labels are the labels below the chart, at most maxLabels.
func (c chart) Labels() []mark {
	list := []mark{}
	width := chartWide / float64(max(len(c.Points), 1))
	interval := (len(c.Points) + maxLabels - 1) / maxLabels
	for i, p := range c.Points {
		if i%interval == 0 {
			list = append(list, mark{X: percentX(width * (float64(i) + .5)), Y: formatSVG(chartHigh - 5), Text: p.Short})
		}
	}
	return list
}

// Box is the viewBox of the lines, and High the height of the chart.
func (c chart) Box() string {
	return fmt.Sprintf("0 0 %s %s", formatSVG(chartWide), formatSVG(chartHigh))
}
func (c chart) High() string { return formatSVG(chartHigh) }

// Rows are the points with formatted values, latest first.
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
