package executions

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Register registers a durable function under a name. Call it before Run, which announces the flows of this process to
// other processes. It returns an error for an empty or registered name.
func (e *Engine) Register(flow string, fn Func) error {
	if flow == "" || fn == nil {
		return errors.New("register flow: a name and a function are required")
	}
	if !utf8.ValidString(flow) || strings.ContainsRune(flow, 0) {
		return fmt.Errorf("register flow %q: a name is UTF-8 without NUL", flow)
	}
	e.flowsMu.Lock()
	defer e.flowsMu.Unlock()
	if _, exists := e.flows[flow]; exists {
		return fmt.Errorf("register flow %s: the name is registered already", flow)
	}
	e.flows[flow] = fn
	return nil
}

// Fallback sets a function that finds unregistered flows, such as flows stored as data. find returns nil for an unknown
// flow. If find returns an error, the engine releases the execution for another attempt. Call Fallback before Run.
func (e *Engine) Fallback(find func(ctx context.Context, flow string) (Func, error)) {
	e.fallback = find
}

// HasFlow reports whether a flow is registered in this or another live process, or the fallback finds it.
func (e *Engine) HasFlow(ctx context.Context, flow string) (bool, error) {
	fn, err := e.flow(ctx, flow)
	if fn != nil || err != nil {
		return fn != nil, err
	}
	var registered bool
	err = e.pool.QueryRow(ctx, `
		select exists (select from agent_workers w where w.go_flows @> array[@flow] and w.expires_at > clock_timestamp())`,
		postgres.Strict{"flow": flow}).Scan(&registered)
	if err != nil {
		return false, fmt.Errorf("find flow %s: %w", flow, err)
	}
	return registered, nil
}

// Flows returns the registered flows of all live processes, sorted. It omits flows of the fallback.
func (e *Engine) Flows(ctx context.Context) ([]string, error) {
	rows, err := e.pool.Query(ctx, `
		select name from unnest(@mine::text[]) name
		union
		select unnest(w.go_flows) from agent_workers w where w.expires_at > clock_timestamp()`,
		postgres.Strict{"mine": e.registeredFlows()})
	names, err := postgres.Collect(rows, err, "list the flows of workers", pgx.RowTo[string])
	slices.Sort(names)
	return names, err
}

// registeredFlows returns the flows that are registered in this process.
func (e *Engine) registeredFlows() []string {
	e.flowsMu.RLock()
	defer e.flowsMu.RUnlock()
	return slices.AppendSeq(make([]string, 0, len(e.flows)), maps.Keys(e.flows))
}

// flow returns the function of a flow; nil if this process does not know the flow.
func (e *Engine) flow(ctx context.Context, name string) (Func, error) {
	e.flowsMu.RLock()
	fn := e.flows[name]
	e.flowsMu.RUnlock()
	if fn != nil || e.fallback == nil {
		return fn, nil
	}
	return e.fallback(ctx, name)
}

var flowName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_.:-]{0,99}$`)

// CheckName returns an error if name cannot be that of a flow in a definition: a workspace flow, a Go flow or
// external:NAME.
func CheckName(name string) error {
	if !flowName.MatchString(name) {
		return fmt.Errorf("%.120q must be a letter, then at most 99 letters, digits and _ . : -", name)
	}
	return nil
}

// reservedFlows are the flows that only the agent itself starts, sorted.
var reservedFlows = []string{
	"automation", "chat", "chat_relay", "chat_summary", "delegate", "eval", "heartbeat", "mcp.call", "operate",
	"skill_call", "webhook",
}

// Reserved lists the flows that only the agent itself starts, sorted. An embedding program must not register them.
func Reserved() []string { return slices.Clone(reservedFlows) }

// IsReserved reports whether only the agent itself starts a flow.
func IsReserved(flow string) bool { return slices.Contains(reservedFlows, ReservedName(flow)) }

// ReservedName returns a flow without the id of an eval's trial: "eval" for "eval:1f0c".
func ReservedName(flow string) string {
	if strings.HasPrefix(flow, "eval:") {
		return "eval"
	}
	return flow
}
