package selfheal

import (
	"cmp"
	"context"
	_ "embed" // for the query
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

//go:embed measure.sql
var measureSQL string

// measured is how an enabled skill fares. Failures and Classes are there when the rule is tripped.
type measured struct {
	Skill    string
	SkillID  string
	Calls    int
	Errors   int
	Streak   int
	Since    time.Time
	ByStreak bool
	ByRate   bool
	Failures []Failure
	Classes  map[string]int
}

// measure reads the calls of one enabled skill, or of all of them when skill is empty.
func measure(ctx context.Context, db postgres.DB, p Policy, skill string) ([]measured, error) {
	rows, err := db.Query(ctx, measureSQL, pgx.QueryExecModeCacheDescribe, postgres.Strict{
		"skill": skill, "window": p.Window, "failures": p.Failures, "rate": p.Rate, "rate_calls": p.RateCalls,
	})
	if err != nil {
		return nil, fmt.Errorf("measure skills: %w", err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByName[measured])
	if err != nil {
		return nil, fmt.Errorf("measure skills: %w", err)
	}
	return list, nil
}

func (m measured) tripped() bool { return m.ByStreak || m.ByRate }

// evidence is what an admin needs to see that the rule was applied rightly.
func (m measured) evidence(p Policy) Evidence {
	e := Evidence{
		Rule: "streak", Streak: m.Streak, Calls: m.Calls, Errors: m.Errors, Window: p.Window.String(),
		Since: m.Since.UTC(), Classes: m.Classes, Failures: m.Failures,
	}
	if !m.ByStreak {
		e.Rule = "rate"
	}
	if m.Calls > 0 {
		e.Rate = float64(m.Errors) / float64(m.Calls)
	}
	return e
}

// reason is the evidence in words.
func (m measured) reason() string {
	text := fmt.Sprintf("%d consecutive failures", m.Streak)
	if !m.ByStreak {
		text = fmt.Sprintf("%d of %d calls failed (%d %%)", m.Errors, m.Calls, 100*m.Errors/max(m.Calls, 1))
		if class, n := m.commonest(); class != "" && len(m.Classes) > 1 {
			text += fmt.Sprintf(", %d of them %s", n, class)
		}
	}
	if len(m.Failures) == 0 {
		return text
	}
	last := m.Failures[0]
	return text + ", last: " + cmp.Or(strings.Trim(last.ErrorClass+": "+oneLine(last.ErrorMessage, 200), ": "), "no message")
}

// commonest is the error class that occurs most; the first by name of equals.
func (m measured) commonest() (class string, n int) {
	for _, c := range slices.Sorted(maps.Keys(m.Classes)) {
		if m.Classes[c] > n {
			class, n = c, m.Classes[c]
		}
	}
	return class, n
}

// oneLine is text without line breaks, of at most n runes.
func oneLine(s string, n int) string {
	runes := []rune(strings.Join(strings.Fields(s), " "))
	if len(runes) <= n {
		return string(runes)
	}
	return string(runes[:n-1]) + "…"
}
