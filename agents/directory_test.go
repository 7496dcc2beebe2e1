package agents

import (
	"math"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestTheAgentsOfAKeyAreAListOfTheirOwn(t *testing.T) {
	t.Parallel()
	all := []Agent{
		{Definition: Definition{Name: "billing"}},
		{Definition: Definition{Name: "sales", Default: true, Delegates: []string{"billing"}}},
	}
	reached := ReachedBy(all, "site")
	assert.Equal(t, 1, len(reached))
	assert.Equal(t, "sales", reached[0].Name)
	assert.Equal(t, "billing", all[0].Name, "the turn may delegate to it")
	assert.Equal(t, "sales", all[1].Name)
}

func TestLimitsAreNumbers(t *testing.T) {
	t.Parallel()
	for _, bad := range []float64{-1, math.NaN(), math.Inf(1)} {
		err := Validate(Definition{Name: "a", Limits: Limits{DayUSD: bad}})
		assert.ErrorContains(t, err, "limits.day_usd", bad)
	}
}
