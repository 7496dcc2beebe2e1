// Package budgets bounds what model calls use: tokens and money, per run, per surface and per day (UTC).
//
// A call's worst case is reserved in every scope before the call, in the transaction that records its
// intent, and settled after, in the transaction that records its result. What was not used is free again.
//
// What it promises:
//
//   - Concurrent calls do not overspend together, however many they are and wherever they run: a
//     reservation is decided under the row locks of its scopes, by what is spent and what is set aside.
//     Only a call that uses more than its reservation (a server that ignores max_tokens, a prompt reckoned
//     too low) can go beyond a limit; it is settled at what it used, and the next call finds less.
//   - A small rest shortens the answer that is asked for instead of refusing it, down to a least.
//   - Others' reservations make a call wait, for a bounded time; only what is spent ends a run at once.
//   - Each request to a provider has a reservation of its own, committed before it leaves. What was spent is never
//     below what the provider bills, over kills, pauses and time-outs: a request that was sent and not answered may
//     have been billed, so its reservation is written off. It counts as spent at its worst case, and as unknown.
//   - The database writes off what a lost claim has reserved, when another claim takes the execution over, and what is
//     under way when an execution ends. A call that is made again has another reservation: the provider bills both.
//
// Limits are the caller's and come with every reservation, so a change of configuration holds from the next
// call on. What is spent is counted also where nothing bounds it. All functions are safe for concurrent use.
package budgets

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Limit bounds a scope. Zero fields bound nothing.
type Limit struct {
	Tokens int64 // prompt and completion together
	USD    float64
}

// Limits are those of all runs together, by the UTC day. Surface bounds what one surface's runs may use of
// a day, within Day.
type Limits struct {
	Day     Limit
	Surface map[trace.Surface]Limit
	// Patience is how long a call waits for what others have reserved; the constant of that name when zero.
	Patience time.Duration
}

// Scope is a limit with the name under which it is counted; {day} in a name is the database's UTC date.
type Scope struct {
	Name string `json:"name"`
	Limit
}

// RunScope is the name under which a trace's calls are counted.
func RunScope(id trace.ID) string { return "run:" + string(id) }

// AgentScope is where the calls of an agent are counted by the day.
func AgentScope(name string, limit Limit) Scope {
	return Scope{Name: "day:{day}:" + agentPrefix + name, Limit: limit}
}

// agentPrefix stands before an agent's name where a scope of the day has a surface's otherwise.
const agentPrefix = "agent:"

// Scopes lists where a call made by a surface is counted: the day, the surface's day, and what else the
// caller gives.
func (l Limits) Scopes(surface trace.Surface, others ...Scope) []Scope {
	return append([]Scope{
		{Name: "day:{day}", Limit: l.Day},
		{Name: "day:{day}:" + string(surface), Limit: l.Surface[surface]},
	}, others...)
}

// Kinds of refusals.
const (
	Spent    = "spent"    // the limit leaves too little for a useful answer
	Reserved = "reserved" // calls under way hold what is missing
)

// Units of limits.
const (
	Tokens = "tokens"
	USD    = "usd"
)

// Error says which limit a call does not fit into.
type Error struct {
	Scope    string
	Unit     string // Tokens or USD
	Kind     string // Spent or Reserved
	Limit    float64
	Spent    float64
	Reserved float64 // set aside for calls under way
}

// Error names the limit and how much of it is gone.
func (e *Error) Error() string {
	text := fmt.Sprintf("the limit of %s for %s leaves too little for another model call: %s spent",
		amount(e.Limit, e.Unit), scopeText(e.Scope), amount(e.Spent, e.Unit))
	if e.Kind == Reserved {
		text = fmt.Sprintf("the limit of %s for %s is taken up by calls under way: %s spent",
			amount(e.Limit, e.Unit), scopeText(e.Scope), amount(e.Spent, e.Unit))
	}
	if e.Reserved > 0 {
		text += ", " + amount(e.Reserved, e.Unit) + " set aside"
	}
	return text
}

// Ends is when the limit begins anew: that of a day with the next, UTC. Zero for one that does not.
func (e *Error) Ends() time.Time {
	kind, rest, _ := strings.Cut(e.Scope, ":")
	date, _, _ := strings.Cut(rest, ":")
	day, err := time.Parse(time.DateOnly, date)
	if kind != "day" || err != nil {
		return time.Time{}
	}
	return day.AddDate(0, 0, 1)
}

// scopeText is a scope's name in words.
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
		return "$" + strconv.FormatFloat(n, 'f', -1, 64)
	}
	return strconv.FormatFloat(n, 'f', 0, 64) + " tokens"
}

// Standing is what a scope has used.
type Standing struct {
	Scope          string  `json:"scope"`
	Tokens         int64   `json:"tokens"`
	CostUSD        float64 `json:"cost_usd"`
	ReservedTokens int64   `json:"reserved_tokens"`
	ReservedUSD    float64 `json:"reserved_usd"`
	Unsettled      int     `json:"unsettled"`      // calls whose usage nobody reported
	UnknownTokens  int64   `json:"unknown_tokens"` // the part of Tokens that is theirs, at its worst case
	UnknownUSD     float64 `json:"unknown_usd"`    // the part of CostUSD that is theirs
}

// Today lists the day's scopes by name: the day itself and each surface that has asked a model.
func Today(ctx context.Context, db postgres.DB) ([]Standing, error) {
	rows, err := db.Query(ctx, `
		select scope, tokens, cost_usd::float8, reserved_tokens, reserved_usd::float8, unsettled, unknown_tokens, unknown_usd::float8
		  from agent_budget_today`)
	return postgres.Collect(rows, err, "list budgets", pgx.RowToStructByPos[Standing])
}

// AgentOf is what an agent has used of the day, out of the list of [Today].
func AgentOf(today []Standing, name string) Standing {
	for _, s := range today {
		if strings.HasSuffix(s.Scope, ":"+agentPrefix+name) {
			return s
		}
	}
	return Standing{}
}

// Of returns what a scope has used: nothing, where no call was counted.
func Of(ctx context.Context, db postgres.DB, scope string) (Standing, error) {
	rows, err := db.Query(ctx, `
		select scope, tokens, cost_usd::float8, reserved_tokens, reserved_usd::float8, unsettled, unknown_tokens, unknown_usd::float8
		  from agent_budgets
		 where scope = @scope`, postgres.Strict{"scope": scope})
	got, err := postgres.Collect(rows, err, "read budget of "+scope, pgx.RowToStructByPos[Standing])
	if len(got) == 0 {
		return Standing{Scope: scope}, err
	}
	return got[0], err
}
