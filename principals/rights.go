package principals

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
)

// Role bounds the rights of a principal.
type Role string

// The roles.
const (
	None     Role = "none"
	Viewer   Role = "viewer"
	Operator Role = "operator"
	Approver Role = "approver"
	Admin    Role = "admin"
)

// Roles lists the roles, the one without rights first.
func Roles() []string {
	return []string{string(None), string(Viewer), string(Operator), string(Approver), string(Admin)}
}

func (r Role) check() error {
	if !slices.Contains(Roles(), string(r)) {
		return fmt.Errorf("%w: role must be one of %s; got %.40q", ErrInvalid, strings.Join(Roles(), ", "), string(r))
	}
	return nil
}

// Scope is a right that a route requires.
type Scope string

// The scopes.
const (
	RunsRead        Scope = "runs:read"
	RunsWrite       Scope = "runs:write"
	ThreadsRead     Scope = "threads:read"
	ThreadsWrite    Scope = "threads:write"
	Operate         Scope = "operate"
	ApprovalsRead   Scope = "approvals:read"
	ApprovalsDecide Scope = "approvals:decide"
	Administer      Scope = "admin"
	// Work is the scope of routes for workers. A token grants it as work:GLOB, for the flows that match.
	Work Scope = "work"
	// Authenticated is the scope of routes that every enabled principal may use.
	Authenticated Scope = "authenticated"
)

// All grants all scopes of the role, in a token.
const All = "*"

// scopesOf are the scopes by role.
var scopesOf = map[Role][]Scope{
	Viewer:   {RunsRead, ApprovalsRead},
	Operator: {RunsRead, RunsWrite, ThreadsRead, ThreadsWrite, Operate, ApprovalsRead},
	Approver: {RunsRead, ThreadsRead, ApprovalsRead, ApprovalsDecide},
	Admin:    {RunsRead, RunsWrite, ThreadsRead, ThreadsWrite, Operate, ApprovalsRead, ApprovalsDecide, Administer, Work},
}

// Scopes lists the scopes that a role has.
func (r Role) Scopes() []Scope { return slices.Clone(scopesOf[r]) }

// May reports whether a role has a scope.
func (r Role) May(s Scope) bool { return slices.Contains(scopesOf[r], s) }

// Caller is an authenticated principal with the rights of its credential.
type Caller struct {
	Principal
	TokenID   string // of the API token, or empty
	SessionID string // of the browser's session, or empty
	// Scopes are those of the token. All grants the scopes of the role.
	Scopes []string
	// ExpiresAt is the expiry of the session or token. It is zero for a token without one.
	ExpiresAt time.Time
}

// RootCaller returns the caller of a request with AGENT_ADMIN_TOKEN.
func RootCaller() *Caller {
	return &Caller{Principal: Principal{Name: Root, Kind: User, Role: Admin}, Scopes: []string{All}}
}

// May reports whether the caller may use the routes of a scope: role ∩ scopes. For [Work] it reports whether the caller
// may run executions of at least one flow; see [Caller.MayWork].
func (c *Caller) May(s Scope) bool {
	if s == Authenticated {
		return true
	}
	if s == Work {
		return c.AllFlows() || len(c.globs()) > 0
	}
	return c.Role.May(s) && (slices.Contains(c.Scopes, All) || slices.Contains(c.Scopes, string(s)))
}

// AllFlows reports whether the caller may run executions of all flows.
func (c *Caller) AllFlows() bool { return c.Role == Admin && slices.Contains(c.Scopes, All) }

// MayWork reports whether the caller may run executions of a flow.
func (c *Caller) MayWork(flow string) bool {
	return c.AllFlows() || slices.ContainsFunc(c.globs(), func(glob string) bool {
		ok, err := path.Match(glob, flow)
		return err == nil && ok
	})
}

// globs lists the flows of the scopes work:GLOB, which services and admins may have.
func (c *Caller) globs() (globs []string) {
	if c.Kind != Service && c.Role != Admin {
		return nil
	}
	for _, s := range c.Scopes {
		if glob, ok := strings.CutPrefix(s, string(Work)+":"); ok {
			globs = append(globs, glob)
		}
	}
	return globs
}

// Effective lists the scopes that the caller has, with work:GLOB.
func (c *Caller) Effective() []string {
	list := []string{}
	for _, s := range scopesOf[c.Role] {
		if s != Work && c.May(s) {
			list = append(list, string(s))
		}
	}
	if c.AllFlows() {
		return append(list, "work:*")
	}
	for _, glob := range c.globs() {
		list = append(list, "work:"+glob)
	}
	return list
}

type callerKey struct{}

// WithCaller returns a context with the caller, for handlers, and as the actor of their activities. A caller without
// [ThreadsRead] receives no texts of conversations; see [activity.WithoutTexts].
func WithCaller(ctx context.Context, c *Caller, via string) context.Context {
	ctx = activity.WithActor(ctx, activity.Actor{Name: c.Name, TokenID: c.TokenID, Via: via})
	if !c.May(ThreadsRead) {
		ctx = activity.WithoutTexts(ctx)
	}
	return context.WithValue(ctx, callerKey{}, c)
}

// From returns the caller; nil outside an authenticated request.
func From(ctx context.Context) *Caller {
	c, _ := ctx.Value(callerKey{}).(*Caller)
	return c
}

// Matches reports whether a notification on [Channel] is about the caller.
func (c *Caller) Matches(payload string) bool {
	return payload != "" && (payload == c.ID || payload == c.TokenID || payload == c.SessionID)
}
