// Package principals stores the rights of callers: principals with their roles, API tokens, sessions of browsers,
// one-use login links, and linked accounts of other issuers.
//
// A principal is a user or a service. It has one role. A token has scopes, which narrow the role's rights; a session
// has all rights of the role. The rights of a caller are role ∩ scopes. Every route of package api names the scope it
// needs:
//
//	scope              routes                                        viewer  operator  approver  admin
//	runs:read          traces, executions, objectives, skills        ✓       ✓         ✓         ✓
//	runs:write         start, cancel, retry, decide on objectives            ✓                   ✓
//	threads:read       threads, memory, documents, prompts                   ✓         ✓         ✓
//	threads:write      send messages, write memory, invite                   ✓                   ✓
//	operate            operate, pause, lanes, skills, webhooks               ✓                   ✓
//	approvals:read     approvals                                     ✓       ✓         ✓         ✓
//	approvals:decide   approve and reject                                              ✓         ✓
//	admin              principals, tokens, sessions, retention                                   ✓
//	work:GLOB          lock, checkpoint and beat executions                                      ✓
//
// Role none has no right. A service with any role may also have work:GLOB: it runs executions of the matching flows,
// sends their messages, and reaches no other execution. A token with scope * has all scopes of the role. It includes
// work only for an admin.
//
// Guarantees:
//
//   - Only digests of secrets are stored. A secret is returned once, by the function that creates it.
//   - Every process rejects a revoked token or session, and those of a disabled principal, from the commit on: each
//     request reads its row. A notification on [Channel] or a poll ends open streams.
//   - The database's clock decides whether a credential has expired.
//   - An identity is an issuer with the id of an account there. Names and e-mail addresses identify nobody.
//   - The principal root stands for AGENT_ADMIN_TOKEN. It cannot be disabled, and its role stays admin.
//   - Each change is an act in the activity log, in the same transaction.
package principals

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
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

// The kinds of principals.
const (
	User    = "user"
	Service = "service"
)

// Root is the principal of AGENT_ADMIN_TOKEN.
const Root = "root"

var (
	// ErrNotFound reports a principal, token, session or link that does not exist.
	ErrNotFound = errors.New("there is no such principal, token or session")
	// ErrInvalid reports an invalid value of a principal, token or identity.
	ErrInvalid = errors.New("invalid")
	// ErrTaken reports a name or identity of another principal.
	ErrTaken = errors.New("taken")
)

// Principal is a user or a service with one role.
type Principal struct {
	ID         string     `json:"id"`
	Name       string     `json:"name"`
	Kind       string     `json:"kind"` // user or service
	Role       Role       `json:"role"`
	CreatedAt  time.Time  `json:"created_at"`
	DisabledAt *time.Time `json:"disabled_at"`
}

// Enabled reports whether the principal is not disabled.
func (p Principal) Enabled() bool { return p.DisabledAt == nil }

// Caller is an authenticated principal with the rights of its credential.
type Caller struct {
	Principal
	TokenID   string // of the API token, or empty
	SessionID string // of the browser's session, or empty
	// Scopes are those of the token. All grants the scopes of the role.
	Scopes []string
	// ExpiresAt is the expiry of the session. It is zero for a token.
	ExpiresAt time.Time
}

// RootCaller returns the caller of a request with AGENT_ADMIN_TOKEN.
func RootCaller() *Caller {
	return &Caller{Principal: Principal{Name: Root, Kind: User, Role: Admin}, Scopes: []string{All}}
}

// May reports whether the caller may use routes of a scope: role ∩ scopes. For [Work] it reports whether the caller may
// run executions of some flow; see [Caller.MayWork].
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

const columns = `p.id::text as id, p.name, p.kind, p.role, p.created_at, p.disabled_at`

// Find returns a principal by its name or id.
func Find(ctx context.Context, db postgres.DB, name string) (Principal, error) {
	return postgres.RowOr[Principal](ctx, db, ErrNotFound, "find principal",
		`select `+columns+` from agent_principals p where p.name = @name or p.id::text = @name`,
		postgres.Strict{"name": name})
}

// ByIdentity returns the enabled principal of an account, such as (slack:TEAM, user id), or ErrNotFound. It does not
// check rights: use p.Role.May.
func ByIdentity(ctx context.Context, db postgres.DB, issuer, subject string) (Principal, error) {
	return postgres.RowOr[Principal](ctx, db, ErrNotFound, "find identity", `
		select `+columns+` from agent_identities i join agent_principals p on p.id = i.principal_id
		 where i.issuer = @issuer and i.subject = @subject and p.disabled_at is null`,
		postgres.Strict{"issuer": issuer, "subject": subject})
}

// List returns all principals by name.
func List(ctx context.Context, db postgres.DB) ([]Principal, error) {
	return postgres.Rows[Principal](ctx, db, "list principals",
		`select `+columns+` from agent_principals p order by p.name`)
}

// recordAct runs change and records it as an act, in one transaction. input identifies the changed object.
func recordAct(ctx context.Context, db postgres.Beginner, name, reason string, input map[string]any,
	change func(tx pgx.Tx) (output any, err error),
) error {
	_, err := activity.Record(ctx, db, activity.Act{Name: name, Reason: reason, Input: input},
		func(tx pgx.Tx, _ string) (any, error) { return change(tx) })
	return err
}

// reserved are names of other actors in the audit log.
var reserved = []string{
	Root, "admin", "agent", "sender", "visitor", "self-heal", "channel", "operate", "chat", "heartbeat",
}

// CreateParams are the parameters of [Create].
type CreateParams struct {
	Name, Kind string
	Role       Role
	Reason     string
}

func (n CreateParams) check() error {
	switch {
	case slices.Contains(reserved, n.Name):
		return fmt.Errorf("%w: the name %s is reserved", ErrInvalid, n.Name)
	case n.Name == "" || len(n.Name) > 100 || strings.ContainsFunc(n.Name, isUnprintable):
		return fmt.Errorf("%w: a name has 1 to 100 printable characters without spaces; got %.120q", ErrInvalid, n.Name)
	case n.Kind != User && n.Kind != Service:
		return fmt.Errorf("%w: kind must be user or service; got %.40q", ErrInvalid, n.Kind)
	}
	return n.Role.check()
}

func (r Role) check() error {
	if !slices.Contains(Roles(), string(r)) {
		return fmt.Errorf("%w: role must be one of %s; got %.40q", ErrInvalid, strings.Join(Roles(), ", "), string(r))
	}
	return nil
}

func isUnprintable(r rune) bool { return r <= ' ' || r == 0x7f || r > 0x7f && !unicode.IsPrint(r) }

// Create creates a principal.
func Create(ctx context.Context, db postgres.Beginner, n CreateParams) (p Principal, err error) {
	if err := n.check(); err != nil {
		return p, err
	}
	input := map[string]any{"principal": n.Name, "kind": n.Kind, "role": string(n.Role)}
	err = recordAct(ctx, db, "create_principal", n.Reason, input, func(tx pgx.Tx) (any, error) {
		p, err = insert(ctx, tx, n)
		return map[string]string{"id": p.ID}, err
	})
	return p, err
}

func insert(ctx context.Context, tx pgx.Tx, n CreateParams) (Principal, error) {
	rows, err := tx.Query(ctx, `
		insert into agent_principals as p (name, kind, role) values (@name, @kind, @role) on conflict do nothing
		returning `+columns, postgres.Strict{"name": n.Name, "kind": n.Kind, "role": string(n.Role)})
	taken := fmt.Errorf("%w: principal %s exists", ErrTaken, n.Name)
	return postgres.CollectOne(rows, err, taken, "create principal", pgx.RowToStructByName[Principal])
}

// SetRole changes the role of a principal. It applies to its tokens and sessions at once.
func SetRole(ctx context.Context, db postgres.Beginner, name string, role Role, reason string) (Principal, error) {
	if err := role.check(); err != nil {
		return Principal{}, err
	}
	return update(ctx, db, "set_principal_role", name, reason, map[string]any{"role": string(role)},
		func(tx pgx.Tx, p Principal) error {
			_, err := tx.Exec(ctx, `update agent_principals set role = @role where id = @id::uuid`,
				postgres.Strict{"id": p.ID, "role": string(role)})
			return err
		})
}

// SetEnabled disables or enables a principal. While it is disabled, its tokens and sessions are rejected.
func SetEnabled(
	ctx context.Context, db postgres.Beginner, name string, enabled bool, reason string,
) (Principal, error) {
	act := "disable_principal"
	if enabled {
		act = "enable_principal"
	}
	return update(ctx, db, act, name, reason, nil, func(tx pgx.Tx, p Principal) error {
		_, err := tx.Exec(ctx, `update agent_principals
			set disabled_at = case when @enabled then null else coalesce(disabled_at, clock_timestamp()) end
			where id = @id::uuid`, postgres.Strict{"id": p.ID, "enabled": enabled})
		return err
	})
}

// update changes a principal and notifies its open streams.
func update(ctx context.Context, db postgres.Beginner, act, name, reason string, input map[string]any,
	change func(tx pgx.Tx, p Principal) error,
) (p Principal, err error) {
	if input == nil {
		input = map[string]any{}
	}
	input["principal"] = name
	err = recordAct(ctx, db, act, reason, input, func(tx pgx.Tx) (any, error) {
		was, err := getForUpdate(ctx, tx, name)
		if err != nil {
			return nil, err
		}
		if was.Name == Root {
			return nil, fmt.Errorf("%w: root is the bearer of AGENT_ADMIN_TOKEN; it stays an enabled admin", ErrInvalid)
		}
		input["principal"] = was.Name
		if err := change(tx, was); err != nil {
			return nil, fmt.Errorf("change principal: %w", err)
		}
		if p, err = Find(ctx, tx, was.ID); err != nil {
			return nil, err
		}
		return map[string]any{"was": map[string]any{"role": string(was.Role), "enabled": was.Enabled()}},
			notify(ctx, tx, p.ID)
	})
	return p, err
}

// getForUpdate returns a principal and locks its row.
func getForUpdate(ctx context.Context, tx pgx.Tx, name string) (Principal, error) {
	return postgres.RowOr[Principal](ctx, tx, ErrNotFound, "find principal", `
		select `+columns+` from agent_principals p where p.name = @name or p.id::text = @name for update`,
		postgres.Strict{"name": name})
}

// Channel is the notification channel for changed rights. A payload is the id of a token, session or principal.
const Channel = "agent_access"

func notify(ctx context.Context, db postgres.DB, id string) error {
	_, err := db.Exec(ctx, `select pg_notify(@channel, @id)`, postgres.Strict{"channel": Channel, "id": id})
	return err
}

// Matches reports whether a notification on [Channel] is about the caller.
func (c *Caller) Matches(payload string) bool {
	return payload != "" && (payload == c.ID || payload == c.TokenID || payload == c.SessionID)
}
