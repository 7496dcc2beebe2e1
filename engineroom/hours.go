package engineroom

import (
	"context"
	_ "embed"
	"fmt"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/monitor"
)

//go:embed hours.sql
var hoursSQL string

// hourChart is a chart of the executions of the last 24 hours.
type hourChart struct {
	Hours        []hourRuns
	Runs, Failed int64
	Many         bool // an hour has more executions than counted
}

// hourRuns counts the executions of an hour.
type hourRuns struct {
	At           time.Time
	Runs, Failed int64
	Agent        string `db:"-"` // empty for all agents
}

// URL is the address of the list of the hour's executions, or of its failed executions.
func (h hourRuns) URL(failed bool) string {
	return executionFilter{
		Agent: h.Agent, Failed: failed, timeRange: timeRange{Since: h.At, Until: h.At.Add(time.Hour)},
	}.url()
}

// URL is the address of the list of the chart's executions, or of its failed executions.
func (c hourChart) URL(failed bool) string {
	first := c.Hours[0]
	return executionFilter{Agent: first.Agent, Failed: failed, timeRange: timeRange{Since: first.At}}.url()
}

// hourWidth is the width of an hour in the chart, and hourHeight the height of the chart.
const hourWidth, hourHeight = 20, 56

// hourChart returns the chart. A stream refreshes it at the interval of sums, not of its part.
func (room *Room) hourChart(ctx context.Context, req *pageRequest, agent string) (hourChart, error) {
	read := func() (hourChart, error) { return room.runsByHour(ctx, agent) }
	if !req.streaming || req.cache == nil {
		return read()
	}
	return req.cache.hours.read(sumsInterval, read)
}

// runsByHour reads the chart of this hour and the 23 hours before it, for one agent, or for all agents if agent is
// empty.
func (room *Room) runsByHour(ctx context.Context, agent string) (c hourChart, err error) {
	until := time.Now().UTC().Truncate(time.Hour)
	c.Hours, err = postgres.RowsGeneric[hourRuns](ctx, room.Read, "count executions", hoursSQL, postgres.Strict{
		"since": until.Add(-23 * time.Hour), "until": until, "agent": agent, "count_limit": countLimit,
	})
	for i, h := range c.Hours {
		c.Hours[i].At, c.Hours[i].Agent = h.At.UTC(), agent
		c.Many = c.Many || h.Runs >= countLimit
		c.Runs, c.Failed = c.Runs+h.Runs, c.Failed+h.Failed
	}
	return c, err
}

// Bars are the pieces of the chart: for each hour the failed executions on top of all others.
func (c hourChart) Bars() []bar {
	highest := int64(1)
	for _, h := range c.Hours {
		highest = max(highest, h.Runs)
	}
	var list []bar
	for i, h := range c.Hours {
		base := float64(hourHeight)
		for _, piece := range []struct {
			n     int64
			class string
		}{{h.Runs - h.Failed, "bar-accent"}, {h.Failed, "bar-bad"}} {
			if piece.n <= 0 {
				continue
			}
			height := max(float64(piece.n)/float64(highest)*(hourHeight-2), 2)
			base -= height
			list = append(list, bar{
				X: formatSVG(float64(i*hourWidth + 2)), Y: formatSVG(max(base, 0)), W: formatSVG(hourWidth - 4),
				H: formatSVG(height), Class: piece.class,
			})
		}
	}
	return list
}

// Columns are the whole columns of the chart, with their tooltips.
func (c hourChart) Columns() []bar {
	list := make([]bar, len(c.Hours))
	for i, h := range c.Hours {
		list[i] = bar{
			X: formatSVG(float64(i * hourWidth)), W: formatSVG(hourWidth), H: formatSVG(hourHeight),
			Text: fmt.Sprintf("%s UTC: %s, %s failed", h.At.Format("15:04"), monitor.Counted(h.Runs, "run"),
				human.Count(h.Failed)),
		}
	}
	return list
}

// Latest are the hours, latest first.
func (c hourChart) Latest() []hourRuns {
	list := slices.Clone(c.Hours)
	slices.Reverse(list)
	return list
}

// Box is the chart's viewBox.
func (c hourChart) Box() string { return fmt.Sprintf("0 0 %d %d", 24*hourWidth, hourHeight) }
