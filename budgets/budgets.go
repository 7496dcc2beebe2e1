// Package budgets bounds what model calls use: tokens and money, per run, per surface and per day (UTC).
//
// A model call reserves its worst case in every scope, in the transaction of its intent. The transaction of its result
// settles the real usage and releases the remainder.
//
// Guarantees:
//
//   - Concurrent calls in all processes stay within a limit together. A reservation is decided under the row locks of
//     its scopes. Only a call that uses more than its reservation exceeds a limit: its server ignored max_tokens, or
//     its prompt was estimated too low. It is settled at its real usage.
//   - A small remainder shortens the requested answer, down to a minimum.
//   - A call waits a bounded time for others' reservations. A spent limit ends the run at once.
//   - Each request to a provider has its own reservation, committed before it is sent. A request without an answer may
//     have been billed, so its reservation is written off: it counts as spent at its worst case, and as unknown.
//   - The database writes off the reservations of a lost claim, and those open at the end of an execution.
//
// The caller passes the limits with every reservation, so a new configuration holds from the next call on. Usage is
// counted without limits, too. All functions are safe for concurrent use.
package budgets

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Limit bounds a scope. A zero field means no limit.
type Limit struct {
	Tokens int64 // prompt and completion together
	USD    float64
}

// Limits are daily limits (UTC). Day bounds all runs together. Surface bounds one surface, and counts towards Day.
type Limits struct {
	Day     Limit
	Surface map[trace.Surface]Limit
	// MaxWait bounds the wait for others' reservations. Default: DefaultMaxWait.
	MaxWait time.Duration
}

// Scope is a named limit. {day} in a name is replaced by the database's UTC date.
type Scope struct {
	Name string `json:"name"`
	Limit
}

// RunScope returns the name of a trace's scope.
func RunScope(id trace.ID) string { return "run:" + string(id) }

// AgentScope returns the daily scope of an agent.
func AgentScope(name string, limit Limit) Scope {
	return Scope{Name: "day:{day}:" + agentPrefix + name, Limit: limit}
}

// agentPrefix distinguishes an agent's daily scope from a surface's.
const agentPrefix = "agent:"

// Scopes returns the scopes of a surface's call: the day, the surface's day, and the given others.
func (l Limits) Scopes(surface trace.Surface, others ...Scope) []Scope {
	return append([]Scope{
		{Name: "day:{day}", Limit: l.Day},
		{Name: "day:{day}:" + string(surface), Limit: l.Surface[surface]},
	}, others...)
}

// Values of Error.Kind.
const (
	Spent    = "spent"    // the remainder is too small for a useful answer
	Reserved = "reserved" // other calls hold the remainder
)

// Values of Error.Unit.
const (
	Tokens = "tokens"
	USD    = "usd"
)

// Error reports the limit that a call exceeds.
type Error struct {
	Scope    string
	Unit     string // Tokens or USD
	Kind     string // Spent or Reserved
	Limit    float64
	Spent    float64
	Reserved float64 // by other calls
}

// Error names the limit, and what is spent and reserved of it.
func (e *Error) Error() string {
	text := fmt.Sprintf("the limit of %s for %s leaves too little for another model call: %s spent",
		amount(e.Limit, e.Unit), scopeText(e.Scope), amount(e.Spent, e.Unit))
	if e.Kind == Reserved {
		text = fmt.Sprintf("the limit of %s for %s is reserved by calls in progress: %s spent",
			amount(e.Limit, e.Unit), scopeText(e.Scope), amount(e.Spent, e.Unit))
	}
	if e.Reserved > 0 {
		text += ", " + amount(e.Reserved, e.Unit) + " reserved"
	}
	return text
}

// ResetsAt returns when a spent daily limit resets, at midnight UTC. It is zero for other limits, and for one that is
// reserved: it has room again when the calls in progress end.
func (e *Error) ResetsAt() time.Time {
	kind, rest, _ := strings.Cut(e.Scope, ":")
	date, _, _ := strings.Cut(rest, ":")
	day, err := time.Parse(time.DateOnly, date)
	if kind != "day" || err != nil || e.Kind == Reserved {
		return time.Time{}
	}
	return day.AddDate(0, 0, 1)
}

// scopeText describes a scope in words.
func scopeText(scope string) string {
	kind, rest, _ := strings.Cut(scope, ":")
	day, surface, bySurface := strings.Cut(rest, ":")
	agent, byAgent := strings.CutPrefix(surface, agentPrefix)
	switch {
	case kind == "day" && byAgent:
		return "the agent " + agent + " on " + day + " (UTC)"
	case kind == "day" && bySurface:
		return "the surface " + surface + " on " + day + " (UTC)"
	case kind == "day":
		return "the day " + day + " (UTC)"
	case kind == "run":
		return "the run " + rest
	}
	return scope
}

func amount(n float64, unit string) string {
	if unit == USD {
		places := 1e6 // without the noise of sums
		for n > 0 && n*places < 10 {
			places *= 10
		}
		return "$" + strconv.FormatFloat(math.Round(n*places)/places, 'f', -1, 64)
	}
	return strconv.FormatFloat(n, 'f', 0, 64) + " tokens"
}

// Standing is the usage of a scope.
type Standing struct {
	Scope          string  `json:"scope"`
	Tokens         int64   `json:"tokens"`
	CostUSD        float64 `json:"cost_usd"`
	ReservedTokens int64   `json:"reserved_tokens"`
	ReservedUSD    float64 `json:"reserved_usd"`
	Unsettled      int     `json:"unsettled"`      // calls without a reported usage
	UnknownTokens  int64   `json:"unknown_tokens"` // their part of Tokens, at the worst case
	UnknownUSD     float64 `json:"unknown_usd"`    // their part of CostUSD
}

// Today lists the day's scopes by name: the day itself, and each surface and agent with model calls.
func Today(ctx context.Context, db postgres.DB) ([]Standing, error) {
	rows, err := db.Query(ctx, `
		select scope, tokens, cost_usd::float8, reserved_tokens, reserved_usd::float8, unsettled, unknown_tokens,
		       unknown_usd::float8
		  from agent_budget_today`)
	return postgres.Collect(rows, err, "list budgets", pgx.RowToStructByPos[Standing])
}

// AgentOf returns an agent's usage from the list of [Today].
func AgentOf(today []Standing, name string) Standing {
	for _, s := range today {
		if strings.HasSuffix(s.Scope, ":"+agentPrefix+name) {
			return s
		}
	}
	return Standing{}
}

// Of returns the usage of a scope; the zero usage for an unknown one.
func Of(ctx context.Context, db postgres.DB, scope string) (Standing, error) {
	rows, err := db.Query(ctx, `
		select scope, tokens, cost_usd::float8, reserved_tokens, reserved_usd::float8, unsettled, unknown_tokens,
		       unknown_usd::float8
		  from agent_budgets
		 where scope = @scope`, postgres.Strict{"scope": scope})
	got, err := postgres.Collect(rows, err, "read budget of "+scope, pgx.RowToStructByPos[Standing])
	if len(got) == 0 {
		return Standing{Scope: scope}, err
	}
	return got[0], err
}
