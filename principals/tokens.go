package principals

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// TokenPrefix begins every API token.
const TokenPrefix = "lk_"

// Token is a row of agent_tokens.
type Token struct {
	ID         string     `json:"id"`
	Principal  string     `json:"principal"` // its name
	Name       string     `json:"name"`
	Scopes     []string   `json:"scopes"`
	CreatedAt  time.Time  `json:"created_at"`
	CreatedBy  string     `json:"created_by"`
	ExpiresAt  *time.Time `json:"expires_at"`
	LastUsedAt *time.Time `json:"last_used_at"` // to some minutes
	RevokedAt  *time.Time `json:"revoked_at"`
}

// NewToken describes a token.
type NewToken struct {
	Principal string // name or id
	Name      string
	// Scopes narrow the role: scopes, runs:* for a group of them, work:GLOB, or * for all of the role.
	Scopes []string
	Life   time.Duration // 0 for ever
	Reason string
}

// scopeNames lists the scopes that a token can name.
func scopeNames() []string {
	list := []string{}
	for _, s := range scopesOf[Admin] {
		if s != Work {
			list = append(list, string(s))
		}
	}
	return list
}

// ParseScopes checks the scopes of a token and expands groups such as runs:*.
func ParseScopes(given []string) ([]string, error) {
	var list []string
	for _, s := range given {
		group, isGroup := strings.CutSuffix(s, "*")
		glob, isWork := strings.CutPrefix(s, "work:")
		switch {
		case s == All || slices.Contains(scopeNames(), s):
			list = append(list, s)
		case isWork:
			if _, err := path.Match(glob, ""); err != nil || glob == "" || len(glob) > 200 {
				return nil, fmt.Errorf("%w: %.60q names no flows; use work:GLOB, such as work:external:sum*", ErrInvalid, s)
			}
			list = append(list, s)
		case isGroup && (group == "runs:" || group == "threads:" || group == "approvals:"):
			for _, name := range scopeNames() {
				if strings.HasPrefix(name, group) {
					list = append(list, name)
				}
			}
		default:
			return nil, fmt.Errorf("%w: %.60q is no scope; use *, work:GLOB, or some of %s", ErrInvalid, s,
				strings.Join(scopeNames(), ", "))
		}
	}
	if len(list) == 0 || len(list) > 50 {
		return nil, fmt.Errorf("%w: a token has 1 to 50 scopes; * stands for all of the role", ErrInvalid)
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}

func digest(secret string) []byte {
	sum := sha256.Sum256([]byte(secret))
	return sum[:]
}

// MakeToken creates a token and returns its text lk_ID_SECRET, which is stored nowhere. A token never has more than its
// principal's role.
func MakeToken(ctx context.Context, db postgres.Beginner, n NewToken) (made Token, text string, err error) {
	scopes, err := ParseScopes(n.Scopes)
	if err != nil {
		return made, "", err
	}
	if len(n.Name) > 100 || strings.ContainsFunc(n.Name, func(r rune) bool { return r != ' ' && isOdd(r) }) {
		return made, "", fmt.Errorf("%w: the name of a token has at most 100 printable characters", ErrInvalid)
	}
	id, secret := strings.ToLower(rand.Text()[:12]), rand.Text()
	about := map[string]any{"principal": n.Principal, "made_key": id, "scopes": scopes}
	err = act(ctx, db, "create_token", n.Reason, about, func(tx pgx.Tx) (any, error) {
		p, err := locked(ctx, tx, n.Principal)
		if err != nil {
			return nil, err
		}
		if !p.Enabled() {
			return nil, fmt.Errorf("%w: principal %s is disabled", ErrInvalid, p.Name)
		}
		about["principal"] = p.Name
		_, err = tx.Exec(ctx, `
			insert into agent_tokens (id, secret_sha256, principal_id, name, scopes, created_by, expires_at)
			values (@id, @digest, @principal::uuid, @name, @scopes, @by,
			        clock_timestamp() + make_interval(secs => nullif(@life::float8, 0)))`,
			postgres.Strict{
				"id": id, "digest": digest(secret), "principal": p.ID, "name": n.Name, "scopes": scopes,
				"by":   activity.ActorFrom(ctx).Name,
				"life": n.Life.Seconds(),
			})
		if err != nil {
			return nil, fmt.Errorf("insert the token's row: %w", err)
		}
		made, err = getToken(ctx, tx, id)
		return nil, err
	})
	if err != nil {
		return Token{}, "", err
	}
	return made, TokenPrefix + id + "_" + secret, nil
}

const tokenColumns = `t.id, p.name as principal, t.name, t.scopes, t.created_at, t.created_by, t.expires_at, t.last_used_at,
	t.revoked_at`

func getToken(ctx context.Context, db postgres.DB, id string) (Token, error) {
	return postgres.RowOr[Token](ctx, db, ErrNotFound, "find token", `select `+tokenColumns+`
		from agent_tokens t join agent_principals p on p.id = t.principal_id where t.id = @id`, postgres.Strict{"id": id})
}

// Tokens lists the tokens of a principal, or all for "", newest first.
func Tokens(ctx context.Context, db postgres.DB, principal string) ([]Token, error) {
	return postgres.Rows[Token](ctx, db, "list tokens", `select `+tokenColumns+`
		from agent_tokens t join agent_principals p on p.id = t.principal_id
		where @principal in ('', p.name, p.id::text) order by t.created_at desc, t.id limit 1000`,
		postgres.Strict{"principal": principal})
}

// RevokeToken ends a token. changed is false if it was revoked before.
func RevokeToken(ctx context.Context, db postgres.Beginner, id, reason string) (changed bool, err error) {
	about := map[string]any{"revoked_key": id}
	err = act(ctx, db, "revoke_token", reason, about, func(tx pgx.Tx) (any, error) {
		t, err := getToken(ctx, tx, id)
		if err != nil {
			return nil, err
		}
		about["principal"] = t.Principal
		tag, err := tx.Exec(ctx, `update agent_tokens set revoked_at = clock_timestamp() where id = @id and revoked_at is null`,
			postgres.Strict{"id": id})
		if changed, err = postgres.Changed(tag, err, "revoke token"); err != nil {
			return nil, err
		}
		return map[string]bool{"changed": changed}, notify(ctx, tx, id)
	})
	return changed, err
}

// ErrRefused reports a credential that was right once: expired, revoked, or of a disabled principal.
var ErrRefused = errors.New("the token or session has expired or was revoked, or its principal is disabled")

// seenEvery is how exact last_used_at and last_seen_at are.
const seenEvery = 5 * time.Minute

// ByToken returns the caller of a token's text. ErrNotFound reports a wrong text, which may be a guess. ErrRefused
// reports a token that is no longer valid.
func ByToken(ctx context.Context, db postgres.DB, text string) (*Caller, error) {
	id, secret, whole := strings.Cut(strings.TrimPrefix(text, TokenPrefix), "_")
	if !strings.HasPrefix(text, TokenPrefix) || !whole || len(id) > 40 || len(secret) > 100 ||
		strings.ContainsFunc(id, isOdd) {
		return nil, ErrNotFound
	}
	c := &Caller{TokenID: id}
	var stored []byte
	var live, stale bool
	err := db.QueryRow(ctx, `
		select `+columns+`, t.secret_sha256, t.scopes,
		       t.revoked_at is null and p.disabled_at is null and coalesce(t.expires_at > clock_timestamp(), true),
		       coalesce(t.last_used_at < clock_timestamp() - make_interval(secs => @every::float8), true)
		  from agent_tokens t join agent_principals p on p.id = t.principal_id where t.id = @id`,
		postgres.Strict{"id": id, "every": seenEvery.Seconds()}).
		Scan(&c.ID, &c.Name, &c.Kind, &c.Role, &c.CreatedAt, &c.DisabledAt, &stored, &c.Scopes, &live, &stale)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrNotFound
	case err != nil:
		return nil, fmt.Errorf("look the token up: %w", err)
	case subtle.ConstantTimeCompare(stored, digest(secret)) == 0:
		return nil, ErrNotFound
	case !live:
		return nil, ErrRefused
	}
	if stale {
		_, err = db.Exec(ctx, `update agent_tokens set last_used_at = clock_timestamp() where id = @id`,
			postgres.Strict{"id": id})
		if err != nil {
			return nil, fmt.Errorf("note that a token was used: %w", err)
		}
	}
	return c, nil
}
