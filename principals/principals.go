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
//   - After a revocation has committed, no process accepts a new request with the token or session; the same holds
//     for a disabled principal. Each request reads the row. A notification on [Channel], or a poll, ends open
//     streams.
//   - The database's clock decides whether a credential has expired.
//   - An identity is an issuer with the id of an account there. Names and e-mail addresses identify nobody.
//   - The principal root stands for AGENT_ADMIN_TOKEN. It cannot be disabled, and its role stays admin.
//   - Each change is an act in the activity log, in the same transaction.
package principals

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

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

// recordAct runs change and records it as an act, in one transaction. input identifies the changed object; change may
// add to it.
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

var idForm = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

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
	case idForm.MatchString(n.Name): // functions take a name or an id
		return fmt.Errorf("%w: a name cannot have the form of an id", ErrInvalid)
	case n.Kind != User && n.Kind != Service:
		return fmt.Errorf("%w: kind must be user or service; got %.40q", ErrInvalid, n.Kind)
	}
	return n.Role.check()
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
		before, err := getForUpdate(ctx, tx, name)
		if err != nil {
			return nil, err
		}
		if before.Name == Root {
			return nil, fmt.Errorf("%w: root is the bearer of AGENT_ADMIN_TOKEN; it stays an enabled admin", ErrInvalid)
		}
		input["principal"] = before.Name // name may be the id
		if err := change(tx, before); err != nil {
			return nil, fmt.Errorf("change principal: %w", err)
		}
		if p, err = Find(ctx, tx, before.ID); err != nil {
			return nil, err
		}
		return map[string]any{"was": map[string]any{"role": string(before.Role), "enabled": before.Enabled()}},
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
