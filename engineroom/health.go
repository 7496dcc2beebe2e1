package engineroom

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
)

// mostTroubled is how many skills the overview shows.
const mostTroubled = 10

// fared is how a skill fares, in words.
type fared struct{ activity.Health }

// Rate is the success rate.
func (f fared) Rate() string {
	if f.SuccessRate == nil {
		return "–"
	}
	return percentage(*f.SuccessRate)
}

// P50 is what half of the calls took at most.
func (f fared) P50() string { return milliseconds(f.P50MS) }

// P95 is what all but a twentieth of the calls took at most.
func (f fared) P95() string { return milliseconds(f.P95MS) }

// milliseconds writes a percentile. It is right to a few per cent, so it has two digits.
func milliseconds(ms *float64) string {
	if ms == nil {
		return "–"
	}
	if *ms < 10 {
		return millis(int64(*ms + .5))
	}
	unit := math.Pow(10, math.Floor(math.Log10(*ms))-1)
	return millis(int64(math.Round(*ms/unit) * unit))
}

// Since is from when health is counted.
func (f fared) Since() string {
	return time.Now().UTC().Truncate(time.Hour).AddDate(0, 0, -7).Format("2006-01-02T15:04")
}

// healthPart is the panel of the overview.
func (room *Room) healthPart() part {
	return part{name: "health", every: 10 * time.Second, calm: true, load: room.healthPanel}
}

// healthPanel has the skills that need a look first: out of service, then failing, then the busiest.
func (room *Room) healthPanel(ctx context.Context, _ *visit) (any, error) {
	sums, err := activity.CountedHealth(ctx, room.Read, activity.HealthFilter{})
	if err != nil {
		return nil, err
	}
	counts := map[string]int{}
	list := make([]fared, 0, len(sums.Lines))
	for _, h := range sums.Lines {
		counts[h.State]++
		list = append(list, fared{h})
	}
	trouble := func(f fared) int {
		return map[bool]int{true: 0, false: 1}[f.State == "enabled"]
	}
	slices.SortStableFunc(list, func(a, b fared) int {
		return -cmp.Or(cmp.Compare(trouble(b), trouble(a)), cmp.Compare(a.Streak, b.Streak), cmp.Compare(a.Failed, b.Failed),
			cmp.Compare(a.Calls, b.Calls), -cmp.Compare(a.Skill, b.Skill))
	})
	return map[string]any{
		"Skills": list[:min(len(list), mostTroubled)], "All": len(list), "Until": sums.Until, "Counts": counts,
	}, nil
}
