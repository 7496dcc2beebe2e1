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

// Bounds of a token.
const (
	maxTokenName   = 100 // bytes
	maxTokenScopes = 50
	maxGlob        = 200 // bytes
)

// Bounds of the parts of a plaintext. They limit the work for a malformed one.
const (
	maxTokenID     = 40  // bytes
	maxTokenSecret = 100 // bytes
)

// scopeGroups are the prefixes of the groups that [ParseScopes] expands.
var scopeGroups = []string{"runs:", "threads:", "approvals:"}

// Token is an API token, without its secret.
type Token struct {
	ID         string     `json:"id"`
	Principal  string     `json:"principal"` // its name
	Name       string     `json:"name"`
	Scopes     []string   `json:"scopes"`
	CreatedAt  time.Time  `json:"created_at"`
	CreatedBy  string     `json:"created_by"`
	ExpiresAt  *time.Time `json:"expires_at"`
	LastUsedAt *time.Time `json:"last_used_at"` // accurate to 5 minutes
	RevokedAt  *time.Time `json:"revoked_at"`
}

// Expired reports whether the token has expired.
func (t Token) Expired() bool { return t.ExpiresAt != nil && !t.ExpiresAt.After(time.Now()) }

// TokenParams are the parameters of [CreateToken].
type TokenParams struct {
	Principal string // name or id
	Name      string
	// Scopes narrow the role. A scope is a name, a group (runs:*), work:GLOB, or *, which grants the whole role.
	Scopes []string
	TTL    time.Duration // 0: no expiry
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
			if _, err := path.Match(glob, ""); err != nil || glob == "" || len(glob) > maxGlob || !postgres.IsText(glob) {
				return nil, fmt.Errorf("%w: invalid glob in scope %.60q; valid: work:GLOB, such as work:external:sum*",
					ErrInvalid, s)
			}
			list = append(list, s)
		case isGroup && slices.Contains(scopeGroups, group):
			for _, name := range scopeNames() {
				if strings.HasPrefix(name, group) {
					list = append(list, name)
				}
			}
		default:
			return nil, fmt.Errorf("%w: unknown scope %.60q; valid: *, work:GLOB, %s*, %s", ErrInvalid, s,
				strings.Join(scopeGroups, "*, "), strings.Join(scopeNames(), ", "))
		}
	}
	if len(list) == 0 || len(list) > maxTokenScopes {
		return nil, fmt.Errorf("%w: a token has 1 to %d scopes; * grants the whole role", ErrInvalid, maxTokenScopes)
	}
	slices.Sort(list)
	return slices.Compact(list), nil
}

func digest(secret string) []byte {
	sum := sha256.Sum256([]byte(secret))
	return sum[:]
}

// CreateToken creates a token and returns its plaintext lk_ID_SECRET. Only the SHA-256 of the secret is stored. A
// token never has more rights than its principal's role.
func CreateToken(ctx context.Context, db postgres.Beginner, n TokenParams) (
	created Token, plaintext string, err error,
) {
	scopes, err := ParseScopes(n.Scopes)
	if err != nil {
		return created, "", err
	}
	if len(n.Name) > maxTokenName ||
		strings.ContainsFunc(n.Name, func(r rune) bool { return r != ' ' && isUnprintable(r) }) {
		return created, "", fmt.Errorf("%w: the name of a token has at most %d printable characters", ErrInvalid,
			maxTokenName)
	}
	id, secret := strings.ToLower(rand.Text()[:12]), rand.Text()
	input := map[string]any{"principal": n.Principal, "made_key": id, "scopes": scopes}
	err = recordAct(ctx, db, "create_token", n.Reason, input, func(tx pgx.Tx) (any, error) {
		p, err := getForUpdate(ctx, tx, n.Principal)
		if err != nil {
			return nil, err
		}
		if !p.Enabled() {
			return nil, fmt.Errorf("%w: principal %s is disabled", ErrInvalid, p.Name)
		}
		input["principal"] = p.Name
		_, err = tx.Exec(ctx, `
			insert into agent_tokens (id, secret_sha256, principal_id, name, scopes, created_by, expires_at)
			values (@id, @digest, @principal::uuid, @name, @scopes, @by,
			        clock_timestamp() + make_interval(secs => nullif(@ttl::float8, 0)))`,
			postgres.Strict{
				"id": id, "digest": digest(secret), "principal": p.ID, "name": n.Name, "scopes": scopes,
				"by":  activity.ActorFrom(ctx).Name,
				"ttl": n.TTL.Seconds(),
			})
		if err != nil {
			return nil, fmt.Errorf("token not inserted: %w", err)
		}
		created, err = getToken(ctx, tx, id)
		return nil, err
	})
	if err != nil {
		return Token{}, "", err
	}
	return created, TokenPrefix + id + "_" + secret, nil
}

const tokenColumns = `t.id, p.name as principal, t.name, t.scopes, t.created_at, t.created_by, t.expires_at,
	t.last_used_at, t.revoked_at`

func getToken(ctx context.Context, db postgres.DB, id string) (Token, error) {
	return postgres.RowOr[Token](ctx, db, ErrNotFound, "find token", `select `+tokenColumns+`
		from agent_tokens t join agent_principals p on p.id = t.principal_id where t.id = @id`, postgres.Strict{"id": id})
}

// Tokens lists the tokens of a principal, newest first. Empty principal lists all.
func Tokens(ctx context.Context, db postgres.DB, principal string) ([]Token, error) {
	return postgres.Rows[Token](ctx, db, "list tokens", `select `+tokenColumns+`
		from agent_tokens t join agent_principals p on p.id = t.principal_id
		where @principal in ('', p.name, p.id::text) order by t.created_at desc, t.id limit 1000`,
		postgres.Strict{"principal": principal})
}

// RevokeToken revokes a token. changed is false if it was revoked before.
func RevokeToken(ctx context.Context, db postgres.Beginner, id, reason string) (changed bool, err error) {
	input := map[string]any{"revoked_key": id}
	err = recordAct(ctx, db, "revoke_token", reason, input, func(tx pgx.Tx) (any, error) {
		t, err := getToken(ctx, tx, id)
		if err != nil {
			return nil, err
		}
		input["principal"] = t.Principal
		tag, err := tx.Exec(ctx, `
			update agent_tokens set revoked_at = clock_timestamp() where id = @id and revoked_at is null`,
			postgres.Strict{"id": id})
		if changed, err = postgres.Changed(tag, err, "revoke token"); err != nil {
			return nil, err
		}
		return map[string]bool{"changed": changed}, notify(ctx, tx, id)
	})
	return changed, err
}

// ErrInactive reports a valid credential that is expired or revoked, or whose principal is disabled.
var ErrInactive = errors.New("the token or session has expired or was revoked, or its principal is disabled")

// lastUsedInterval is the minimum time between updates of last_used_at, and between updates of last_seen_at.
const lastUsedInterval = 5 * time.Minute

// AuthenticateToken authenticates a token and returns its caller. It returns ErrNotFound for an unknown or malformed
// token, and ErrInactive for an expired, revoked or disabled token.
func AuthenticateToken(ctx context.Context, db postgres.DB, plaintext string) (*Caller, error) {
	id, secret, ok := strings.Cut(strings.TrimPrefix(plaintext, TokenPrefix), "_")
	if !strings.HasPrefix(plaintext, TokenPrefix) || !ok || len(id) > maxTokenID || len(secret) > maxTokenSecret ||
		strings.ContainsFunc(id, isUnprintable) || !postgres.IsText(id) {
		return nil, ErrNotFound
	}
	c := &Caller{TokenID: id}
	var stored []byte
	var live, stale bool
	var expiresAt *time.Time
	err := db.QueryRow(ctx, `
		select `+columns+`, t.secret_sha256, t.scopes, t.expires_at,
		       t.revoked_at is null and p.disabled_at is null and coalesce(t.expires_at > clock_timestamp(), true),
		       coalesce(t.last_used_at < clock_timestamp() - make_interval(secs => @interval::float8), true)
		  from agent_tokens t join agent_principals p on p.id = t.principal_id where t.id = @id`,
		postgres.Strict{"id": id, "interval": lastUsedInterval.Seconds()}).
		Scan(&c.ID, &c.Name, &c.Kind, &c.Role, &c.CreatedAt, &c.DisabledAt, &stored, &c.Scopes, &expiresAt, &live, &stale)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrNotFound
	case err != nil:
		return nil, fmt.Errorf("token not read: %w", err)
	case subtle.ConstantTimeCompare(stored, digest(secret)) == 0:
		return nil, ErrNotFound
	case !live:
		return nil, ErrInactive
	}
	c.ExpiresAt = postgres.Deref(expiresAt)
	if stale { // on an error the next request retries: a full or read-only database must not refuse readers
		_, _ = db.Exec(ctx, `update agent_tokens set last_used_at = clock_timestamp() where id = @id`,
			postgres.Strict{"id": id})
	}
	return c, nil
}
