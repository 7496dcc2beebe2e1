package principals

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Identity is an account at an issuer that is linked to a principal.
type Identity struct {
	Issuer         string    `json:"issuer"`
	Subject        string    `json:"subject"`
	Principal      string    `json:"principal"` // its name
	RoleFromClaims bool      `json:"role_from_claims"`
	CreatedAt      time.Time `json:"created_at"`
}

// Identities lists the identities of a principal. Empty principal lists all.
func Identities(ctx context.Context, db postgres.DB, principal string) ([]Identity, error) {
	return postgres.Rows[Identity](ctx, db, "list identities", `
		select i.issuer, i.subject, p.name as principal, i.role_from_claims, i.created_at
		  from agent_identities i join agent_principals p on p.id = i.principal_id
		 where @principal in ('', p.name, p.id::text) order by i.issuer, i.subject limit 1000`,
		postgres.Strict{"principal": principal})
}

func checkIdentity(issuer, subject string) error {
	for _, text := range []string{issuer, subject} {
		if text == "" || len(text) > 500 || strings.ContainsFunc(text, isUnprintable) {
			return fmt.Errorf("%w: issuer and subject have 1 to 500 printable characters without spaces", ErrInvalid)
		}
	}
	return nil
}

// LinkIdentity links an account to a principal. The account then has the principal's role. It returns ErrTaken for an
// account of another principal.
func LinkIdentity(ctx context.Context, db postgres.Beginner, principal, issuer, subject, reason string) error {
	if err := checkIdentity(issuer, subject); err != nil {
		return err
	}
	input := map[string]any{"principal": principal, "issuer": issuer, "subject": subject}
	return recordAct(ctx, db, "link_identity", reason, input, func(tx pgx.Tx) (any, error) {
		p, err := getForUpdate(ctx, tx, principal)
		if err != nil {
			return nil, err
		}
		if p.Name == Root {
			return nil, fmt.Errorf("%w: root has no identities; link an admin of your own", ErrInvalid)
		}
		input["principal"] = p.Name
		tag, err := tx.Exec(ctx, `
			insert into agent_identities as i (issuer, subject, principal_id) values (@issuer, @subject, @id::uuid)
			on conflict (issuer, subject) do update set role_from_claims = false where i.principal_id = @id::uuid`,
			postgres.Strict{"issuer": issuer, "subject": subject, "id": p.ID})
		linked, err := postgres.Changed(tag, err, "link identity")
		if err == nil && !linked {
			err = fmt.Errorf("%w: this identity belongs to another principal; unlink it from that principal", ErrTaken)
		}
		return nil, err
	})
}

// UnlinkIdentity removes the link of an account.
func UnlinkIdentity(ctx context.Context, db postgres.Beginner, principal, issuer, subject, reason string) error {
	if err := checkIdentity(issuer, subject); err != nil {
		return err
	}
	input := map[string]any{"principal": principal, "issuer": issuer, "subject": subject}
	return recordAct(ctx, db, "unlink_identity", reason, input, func(tx pgx.Tx) (any, error) {
		tag, err := tx.Exec(ctx, `
			delete from agent_identities i using agent_principals p
			 where p.id = i.principal_id and @principal in (p.name, p.id::text) and i.issuer = @issuer and i.subject = @subject`,
			postgres.Strict{"principal": principal, "issuer": issuer, "subject": subject})
		deleted, err := postgres.Changed(tag, err, "unlink identity")
		if err == nil && !deleted {
			err = fmt.Errorf("%w, or this account is not linked to %s", ErrNotFound, principal)
		}
		return nil, err
	})
}

// Account is an account that an OIDC issuer authenticated, with the role of its claims.
type Account struct {
	Issuer, Subject string
	Name            string // for display; not unique
	Role            Role
}

// LogInIdentity returns the principal of an account. If an admin linked the account, the principal keeps its role.
// Otherwise the claims set the role at each login. The first login with a role creates a principal. It returns
// ErrInactive for an account without a role and for a disabled principal.
func LogInIdentity(ctx context.Context, db postgres.Beginner, a Account) (p Principal, err error) {
	if err := checkIdentity(a.Issuer, a.Subject); err != nil {
		return p, err
	}
	var managed bool
	err = db.QueryRow(ctx, `
		select i.principal_id::text, i.role_from_claims from agent_identities i
		 where i.issuer = @issuer and i.subject = @subject`,
		postgres.Strict{"issuer": a.Issuer, "subject": a.Subject}).Scan(&p.ID, &managed)
	switch {
	case errors.Is(err, pgx.ErrNoRows) && a.Role == None:
		return p, ErrInactive
	case errors.Is(err, pgx.ErrNoRows):
		p, err = createForAccount(ctx, db, a)
		if errors.Is(err, ErrTaken) || postgres.IsCode(err, "23505") {
			if _, missing := ByIdentity(ctx, db, a.Issuer, a.Subject); missing == nil { // by a concurrent first login
				return LogInIdentity(ctx, db, a)
			}
		}
		return p, err
	case err != nil:
		return p, fmt.Errorf("find identity: %w", err)
	}
	if p, err = Find(ctx, db, p.ID); err != nil {
		return p, err
	}
	if managed && p.Role != a.Role {
		ctx := activity.WithActor(ctx, activity.Actor{Name: p.Name, Via: "oidc"})
		if p, err = SetRole(ctx, db, p.ID, a.Role, "the claims of its issuer"); err != nil {
			return p, err
		}
	}
	if !p.Enabled() || p.Role == None {
		return p, ErrInactive
	}
	return p, nil
}

// createForAccount creates the principal of a new account. A taken name gets a part of the account's digest as suffix.
func createForAccount(ctx context.Context, db postgres.Beginner, a Account) (Principal, error) {
	n := CreateParams{Name: principalName(a.Name), Kind: User, Role: a.Role}
	if n.check() != nil {
		n.Name = "user-" + accountDigest(a)
	}
	p, err := createWithIdentity(ctx, db, a, n)
	if errors.Is(err, ErrTaken) {
		n.Name += "-" + accountDigest(a)
		p, err = createWithIdentity(ctx, db, a, n)
	}
	return p, err
}

// createWithIdentity creates a principal with the identity of an account. The new principal is the actor.
func createWithIdentity(
	ctx context.Context, db postgres.Beginner, a Account, n CreateParams,
) (p Principal, err error) {
	input := map[string]any{"principal": n.Name, "role": string(a.Role), "issuer": a.Issuer, "subject": a.Subject}
	ctx = activity.WithActor(ctx, activity.Actor{Name: n.Name, Via: "oidc"})
	err = recordAct(ctx, db, "create_principal", "the first login at its issuer", input, func(tx pgx.Tx) (any, error) {
		if p, err = insert(ctx, tx, n); err != nil {
			return nil, err
		}
		_, err = tx.Exec(ctx, `insert into agent_identities (issuer, subject, principal_id, role_from_claims)
			values (@issuer, @subject, @id::uuid, true)`,
			postgres.Strict{"issuer": a.Issuer, "subject": a.Subject, "id": p.ID})
		return nil, err
	})
	return p, err
}

// principalName converts an account's name to the form of a principal's name, of at most 80 bytes. It is "" for a name
// without letters and digits.
func principalName(name string) string {
	name = strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return '-'
		}
		if isUnprintable(r) {
			return -1
		}
		return r
	}, strings.ToValidUTF8(name, ""))
	name = strings.Trim(strings.ToValidUTF8(name[:min(len(name), 80)], ""), "-")
	if !strings.ContainsFunc(name, func(r rune) bool { return unicode.IsLetter(r) || unicode.IsDigit(r) }) {
		return ""
	}
	return name
}

func accountDigest(a Account) string {
	return hex.EncodeToString(digest(a.Issuer + " " + a.Subject))[:12]
}
