package executions

import (
	"context"
	"maps"
	"strconv"
	"strings"
)

type scopeKey struct{}

// Scope returns a context for a branch whose steps have their own keys. Each parallel branch needs a scope, because the
// order of steps in different branches differs between runs. Scope replaces a slash in the name by an underscore.
func Scope(ctx context.Context, name string) context.Context {
	return withScope(ctx, scopeOf(ctx)+strings.ReplaceAll(name, "/", "_")+"/")
}

// withScope sets the key prefix of the steps under ctx, including slashes.
func withScope(ctx context.Context, prefix string) context.Context {
	return context.WithValue(ctx, scopeKey{}, prefix)
}

func scopeOf(ctx context.Context) string {
	s, _ := ctx.Value(scopeKey{}).(string)
	return s
}

// stepScope returns the context of the steps within a step.
func stepScope(ctx context.Context, s stepSpec) context.Context { return withScope(ctx, s.key+"/") }

// StepKey returns the key of the step that contains ctx. It is empty outside steps.
func StepKey(ctx context.Context) string { return strings.TrimSuffix(scopeOf(ctx), "/") }

type gateKey struct{}

// Gate returns a context under which every step without a checkpoint calls gate first. gate may wait durably, so a run
// can yield to another run between two steps. The step returns an error of gate.
func Gate(ctx context.Context, gate func(ctx context.Context) error) context.Context {
	return context.WithValue(ctx, gateKey{}, gate)
}

// passGate calls the gate of ctx, if any, in a scope of its own. The waits of a gate differ between runs, so they must
// not share keys with other steps.
func passGate(ctx context.Context, s stepSpec) error {
	gate, _ := ctx.Value(gateKey{}).(func(ctx context.Context) error)
	if gate == nil {
		return nil
	}
	inner := withScope(Gate(ctx, nil), gatePrefix(s.key))
	_, err := RetryTransient(inner, func(ctx context.Context) (struct{}, error) { return struct{}{}, gate(ctx) })
	return err
}

// gatePrefix returns the key prefix of waits in the gate of a step; see Gate.
func gatePrefix(key string) string {
	scope, name := splitKey(key)
	return scope + "before " + name + "/"
}

// splitKey splits a step key after its last slash.
func splitKey(key string) (scope, name string) {
	i := strings.LastIndexByte(key, '/') + 1
	return key[:i], key[i:]
}

// nextKey returns the key of a step: its name, and from the second occurrence on its number. The third step "a" and a
// step named "a#3" get different keys. The caller holds r.mu.
func (r *run) nextKey(base string) string {
	if at := strings.LastIndexByte(base, '#'); at >= 0 && r.occurrences[base] == 0 {
		if n, err := strconv.Atoi(base[at+1:]); err == nil && n > 1 && n <= r.occurrences[base[:at]] {
			r.occurrences[base] = 1
		}
	}
	for {
		r.occurrences[base]++
		n := r.occurrences[base]
		if n == 1 {
			return base
		}
		if key := base + "#" + strconv.Itoa(n); r.occurrences[key] == 0 {
			return key
		}
	}
}

// resetKeys resets the occurrences of the inner steps of a step, so they get the same keys when the step is repeated.
func (r *run) resetKeys(step string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.occurrences, func(key string, _ int) bool { return strings.HasPrefix(key, step+"/") })
}
