package principals

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// SessionTTL is the lifetime of a session.
const SessionTTL = 12 * time.Hour

// LinkTTL is the lifetime of a login link.
const LinkTTL = 15 * time.Minute

// The methods of a login.
const (
	WithToken = "token" // AGENT_ADMIN_TOKEN
	WithLink  = "link"
	WithOIDC  = "oidc"
)

// Session is a browser's session, without its secret.
type Session struct {
	ID         string     `json:"id"`
	Principal  string     `json:"principal"` // its name
	Method     string     `json:"method"`    // token, link or oidc
	CreatedAt  time.Time  `json:"created_at"`
	ExpiresAt  time.Time  `json:"expires_at"`
	LastSeenAt time.Time  `json:"last_seen_at"` // accurate to 5 minutes
	RevokedAt  *time.Time `json:"revoked_at"`
	Address    string     `json:"address"`
	Browser    string     `json:"browser"`
}

// Ended reports whether the session was revoked or has expired.
func (s Session) Ended() bool { return s.RevokedAt != nil || !s.ExpiresAt.After(time.Now()) }

// SessionParams are the parameters of [LogIn].
type SessionParams struct {
	Principal        string // name or id; empty with Link
	Link             string // the secret of a login link
	Method           string
	Address, Browser string
	// Digest computes the stored digest of the secret; nil is SHA-256. A login with AGENT_ADMIN_TOKEN uses a digest
	// that is keyed with the token.
	Digest func(secret string) []byte
}

// LogIn creates a session and returns the secret of its cookie. A login link is redeemed, once, in the same
// transaction. LogIn returns ErrNotFound for an unknown, used or expired link, and for a link of a disabled principal.
// It retries after a broken connection, and prunes expired sessions and links.
func LogIn(ctx context.Context, db postgres.Beginner, n SessionParams) (secret string, err error) {
	secret = rand.Text()
	if n.Digest == nil {
		n.Digest = digest
	}
	err = postgres.RetryOnDisconnect(ctx, func() error { return logIn(ctx, db, n, n.Digest(secret)) })
	if err != nil {
		return "", fmt.Errorf("log in: %w", err)
	}
	return secret, nil
}

// logIn creates a session with the digest of its secret. A repeated call with this digest succeeds again.
func logIn(ctx context.Context, db postgres.Beginner, n SessionParams, stored []byte) error {
	return postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if n.Link != "" {
			var err error
			if n.Principal, err = redeemLink(ctx, tx, n.Link, stored); err != nil {
				return err
			}
		}
		tag, err := tx.Exec(ctx, `
			insert into agent_sessions (secret_sha256, principal_id, method, expires_at, address, browser)
			select @digest, p.id, @method, clock_timestamp() + make_interval(secs => @ttl::float8), @address, @browser
			  from agent_principals p where (p.name = @principal or p.id::text = @principal) and p.disabled_at is null
			    on conflict (secret_sha256) do update set last_seen_at = excluded.last_seen_at`,
			postgres.Strict{
				"digest": stored, "method": n.Method, "ttl": SessionTTL.Seconds(), "principal": n.Principal,
				"address": postgres.Text(sanitize(n.Address)), "browser": postgres.Text(sanitize(n.Browser)),
			})
		if inserted, err := postgres.Changed(tag, err, "create session"); err != nil || !inserted {
			return errors.Join(err, ErrInactive)
		}
		_, err = tx.Exec(ctx, `
			with sessions as (
			  delete from agent_sessions where id in (
			    select id from agent_sessions where expires_at < statement_timestamp() - interval '1 day'
			      order by expires_at limit 100 for update skip locked))
			delete from agent_login_links where secret_sha256 in (
			  select secret_sha256 from agent_login_links where expires_at < statement_timestamp() - interval '1 day'
			    order by expires_at limit 100 for update skip locked)`)
		return err
	})
}

// sanitize removes unprintable characters and truncates.
func sanitize(s string) string {
	s = strings.Map(func(r rune) rune {
		if r != ' ' && isUnprintable(r) {
			return -1
		}
		return r
	}, s)
	return s[:min(len(s), 200)]
}

// AuthenticateSession authenticates the secret of a session's cookie and returns its caller. The session is stored
// under SHA-256 or under keyed, which may be nil. It returns ErrNotFound for an unknown, expired or revoked session,
// and for a disabled principal.
func AuthenticateSession(ctx context.Context, db postgres.DB, secret string, keyed func(secret string) []byte) (
	*Caller, error,
) {
	digests := [][]byte{digest(secret)}
	if keyed != nil {
		digests = append(digests, keyed(secret))
	}
	c := &Caller{Scopes: []string{All}}
	var stale bool
	err := db.QueryRow(ctx, `
		select `+columns+`, s.id::text, s.expires_at,
		       s.last_seen_at < clock_timestamp() - make_interval(secs => @interval::float8)
		  from agent_sessions s join agent_principals p on p.id = s.principal_id
		 where s.secret_sha256 = any (@digests) and s.revoked_at is null and s.expires_at > clock_timestamp()
		   and p.disabled_at is null and (p.name <> 'root' or s.secret_sha256 = @keyed)`,
		postgres.Strict{"digests": digests, "keyed": digests[len(digests)-1], "interval": lastUsedInterval.Seconds()}).
		Scan(&c.ID, &c.Name, &c.Kind, &c.Role, &c.CreatedAt, &c.DisabledAt, &c.SessionID, &c.ExpiresAt, &stale)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrNotFound
	case err != nil:
		return nil, fmt.Errorf("session not read: %w", err)
	}
	if stale { // on an error the next request retries: a full or read-only database must not refuse readers
		_, _ = db.Exec(ctx, `update agent_sessions set last_seen_at = clock_timestamp() where id = @id::uuid`,
			postgres.Strict{"id": c.SessionID})
	}
	return c, nil
}

// AccessEnded is the end of a caller's access.
type AccessEnded struct {
	By     string // the principal that ended it; empty after an expiry or a logout
	Reason string
}

func (e *AccessEnded) Error() string { return e.Reason }

// Expired returns the end of the caller's access at ExpiresAt.
func (c *Caller) Expired() *AccessEnded {
	return &AccessEnded{Reason: fmt.Sprintf("the %s of %s expired", c.credential(), c.Name)}
}

func (c *Caller) credential() string {
	if c.TokenID != "" {
		return "token"
	}
	return "session"
}

// Ended returns how the caller's access ended: its token or session is inactive, or its principal is disabled or has
// another role. It returns nil for an unchanged access.
func Ended(ctx context.Context, db postgres.DB, c *Caller) (*AccessEnded, error) {
	var revoked, expired, disabled bool
	var role string
	err := db.QueryRow(ctx, `
		select k.revoked_at is not null, coalesce(k.expires_at <= clock_timestamp(), false), p.disabled_at is not null, p.role
		  from (select principal_id, revoked_at, expires_at from agent_tokens where id = @token
		        union all
		        select principal_id, revoked_at, expires_at from agent_sessions where id = nullif(@session, '')::uuid) k
		  join agent_principals p on p.id = k.principal_id`, postgres.Strict{"token": c.TokenID, "session": c.SessionID}).
		Scan(&revoked, &expired, &disabled, &role)
	var act, reason string
	switch {
	case err != nil && !errors.Is(err, pgx.ErrNoRows):
		return nil, fmt.Errorf("check access: %w", err)
	case err != nil || expired && !revoked: // an expired session may be removed
		return c.Expired(), nil
	case revoked:
		act, reason = "revoke_"+c.credential(), fmt.Sprintf("the %s of %s was revoked", c.credential(), c.Name)
	case disabled:
		act, reason = "disable_principal", c.Name+" was disabled"
	case role != string(c.Role):
		act, reason = "set_principal_role", fmt.Sprintf("the role of %s changed from %s to %s", c.Name, c.Role, role)
	default:
		return nil, nil
	}
	return &AccessEnded{By: endedBy(ctx, db, c, act), Reason: reason}, nil
}

// endedBy returns the principal of the newest act that ended a caller's access; empty if it is unknown. The access ends
// whether the log can be read or not.
func endedBy(ctx context.Context, db postgres.DB, c *Caller, act string) (by string) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_ = db.QueryRow(ctx, `
		select coalesce((select a.input ->> 'by' from agent_activity a
		                  where a.skill_name = @act and a.status = 'success' and a.output ->> 'changed' is distinct from 'false'
		                    and coalesce(a.input ->> 'revoked_key' = @token, a.input ->> 'login' = @session,
		                                 a.input ->> 'principal' = @name)
		                  order by a.id desc limit 1), '')`,
		postgres.Strict{"act": act, "token": c.TokenID, "session": c.SessionID, "name": c.Name}).Scan(&by)
	return by
}

// Sessions lists the sessions of a principal, newest first. Empty principal lists all.
func Sessions(ctx context.Context, db postgres.DB, principal string) ([]Session, error) {
	return postgres.Rows[Session](ctx, db, "list sessions", `
		select s.id::text as id, p.name as principal, s.method, s.created_at, s.expires_at, s.last_seen_at, s.revoked_at,
		       s.address, s.browser
		  from agent_sessions s join agent_principals p on p.id = s.principal_id
		 where @principal in ('', p.name, p.id::text) order by s.created_at desc, s.id limit 1000`,
		postgres.Strict{"principal": principal})
}

// RevokeSession revokes a session. changed is false if it was revoked before.
func RevokeSession(ctx context.Context, db postgres.Beginner, id, reason string) (changed bool, err error) {
	input := map[string]any{"login": id}
	err = recordAct(ctx, db, "revoke_session", reason, input, func(tx pgx.Tx) (any, error) {
		var name string
		err := tx.QueryRow(ctx, `select p.name from agent_sessions s join agent_principals p on p.id = s.principal_id
			where s.id::text = @id`, postgres.Strict{"id": id}).Scan(&name)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil, ErrNotFound
		}
		if err != nil {
			return nil, fmt.Errorf("session not read: %w", err)
		}
		input["principal"] = name
		changed, err = revokeSession(ctx, tx, id)
		return map[string]bool{"changed": changed}, err
	})
	return changed, err
}

// LogOut revokes the caller's own session.
func LogOut(ctx context.Context, db postgres.DB, c *Caller) error {
	_, err := revokeSession(ctx, db, c.SessionID)
	return err
}

func revokeSession(ctx context.Context, db postgres.DB, id string) (bool, error) {
	tag, err := db.Exec(ctx, `
		with revoked as (
		  update agent_sessions set revoked_at = clock_timestamp() where id::text = @id and revoked_at is null returning id)
		select pg_notify(@channel, id::text) from revoked`, postgres.Strict{"id": id, "channel": Channel})
	return postgres.Changed(tag, err, "revoke session")
}

// CreateLink creates a login link of a principal and returns its secret, for /login?link=SECRET.
func CreateLink(ctx context.Context, db postgres.Beginner, principal, reason string) (
	secret string, expiresAt time.Time, err error,
) {
	secret = rand.Text()
	input := map[string]any{"principal": principal}
	err = recordAct(ctx, db, "create_login_link", reason, input, func(tx pgx.Tx) (any, error) {
		p, err := getForUpdate(ctx, tx, principal)
		if err != nil {
			return nil, err
		}
		if !p.Enabled() || p.Name == Root || p.Kind != User {
			return nil, fmt.Errorf("%w: a login link needs an enabled user other than root; %s is not one", ErrInvalid, p.Name)
		}
		input["principal"] = p.Name
		err = tx.QueryRow(ctx, `
			insert into agent_login_links (secret_sha256, principal_id, expires_at)
			values (@digest, @id::uuid, clock_timestamp() + make_interval(secs => @ttl::float8)) returning expires_at`,
			postgres.Strict{"digest": digest(secret), "id": p.ID, "ttl": LinkTTL.Seconds()}).Scan(&expiresAt)
		return nil, err
	})
	if err != nil {
		return "", expiresAt, fmt.Errorf("create login link: %w", err)
	}
	return secret, expiresAt, nil
}

// redeemLink redeems a login link for a session and returns its principal's id.
func redeemLink(ctx context.Context, tx pgx.Tx, secret string, session []byte) (principalID string, err error) {
	err = tx.QueryRow(ctx, `
		update agent_login_links l set used_at = clock_timestamp() from agent_principals p
		 where l.secret_sha256 = @digest and l.expires_at > clock_timestamp()
		   and (l.used_at is null or exists (select from agent_sessions s where s.secret_sha256 = @session))
		   and p.id = l.principal_id and p.disabled_at is null
		returning p.id::text`, postgres.Strict{"digest": digest(secret), "session": session}).Scan(&principalID)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", ErrNotFound
	}
	return principalID, err
}
