package executions

import (
	"context"
	"maps"
	"strconv"
	"strings"
)

type scopeKey struct{}

// Scope returns a context whose step keys begin with name and a slash: a step "pay" in a scope "order" has the key
// "order/pay", and its second occurrence "order/pay#2". Each parallel branch needs a scope, because the order of steps
// in different branches differs between runs. Parallel branches need different names, and no step beside them may have
// the name of a branch: the steps within that step have the same prefix. Scope replaces a slash in the name by an
// underscore.
func Scope(ctx context.Context, name string) context.Context {
	return withPrefix(ctx, scopeOf(ctx)+strings.ReplaceAll(name, "/", "_")+"/")
}

// withPrefix sets the key prefix of the steps under ctx, including slashes.
func withPrefix(ctx context.Context, prefix string) context.Context {
	return context.WithValue(ctx, scopeKey{}, prefix)
}

func scopeOf(ctx context.Context) string {
	s, _ := ctx.Value(scopeKey{}).(string)
	return s
}

// stepScope returns the context of the steps within a step.
func stepScope(ctx context.Context, s stepSpec) context.Context { return withPrefix(ctx, s.key+"/") }

// StepKey returns the key of the step that contains ctx. It is empty outside steps.
func StepKey(ctx context.Context) string { return strings.TrimSuffix(scopeOf(ctx), "/") }

// IdempotencyKey returns the idempotency key of the step that contains ctx; see [Effect.Key]. It is empty outside
// executions.
func IdempotencyKey(ctx context.Context) string {
	r, err := runFrom(ctx)
	if err != nil {
		return ""
	}
	return r.idempotencyKey(StepKey(ctx))
}

type gateKey struct{}

// Gate returns a context under which every step without a checkpoint calls gate first. gate may wait durably, so a run
// can yield between two steps, for example the lane to an admin. If gate fails, the step returns its error.
func Gate(ctx context.Context, gate func(ctx context.Context) error) context.Context {
	return context.WithValue(ctx, gateKey{}, gate)
}

// passGate calls the gate of ctx, if any, with its own key prefix. The waits of a gate differ between runs, so they
// must not share keys with other steps.
func passGate(ctx context.Context, s stepSpec) error {
	gate, _ := ctx.Value(gateKey{}).(func(ctx context.Context) error)
	if gate == nil {
		return nil
	}
	gateCtx := withPrefix(Gate(ctx, nil), gatePrefix(s.key))
	_, err := RetryTransient(gateCtx, func(ctx context.Context) (struct{}, error) { return struct{}{}, gate(ctx) })
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

// nextKey returns the key of a step: its name with the prefix of its scope, and from the second occurrence on its
// number. A literal name such as "a#3" may equal the generated key of the third "a". Then it counts as used, so the two
// steps get different keys. The caller holds r.mu.
func (r *run) nextKey(name string) string {
	if hash := strings.LastIndexByte(name, '#'); hash >= 0 && r.occurrences[name] == 0 {
		if n, err := strconv.Atoi(name[hash+1:]); err == nil && n > 1 && n <= r.occurrences[name[:hash]] {
			r.occurrences[name] = 1
		}
	}
	for {
		r.occurrences[name]++
		n := r.occurrences[name]
		if n == 1 {
			return name
		}
		if key := name + "#" + strconv.Itoa(n); r.occurrences[key] == 0 {
			return key
		}
	}
}

// resetKeys resets the occurrences of the inner steps of a step, so a retry of the step assigns them the same keys.
func (r *run) resetKeys(step string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.occurrences, func(key string, _ int) bool { return strings.HasPrefix(key, step+"/") })
}
