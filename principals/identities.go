package principals

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// Identity is a row of agent_identities.
type Identity struct {
	Issuer         string    `json:"issuer"`
	Subject        string    `json:"subject"`
	Principal      string    `json:"principal"` // its name
	RoleFromClaims bool      `json:"role_from_claims"`
	CreatedAt      time.Time `json:"created_at"`
}

// Identities lists the identities of a principal, or all for "".
func Identities(ctx context.Context, db postgres.DB, principal string) ([]Identity, error) {
	return postgres.Rows[Identity](ctx, db, "list identities", `
		select i.issuer, i.subject, p.name as principal, i.role_from_claims, i.created_at
		  from agent_identities i join agent_principals p on p.id = i.principal_id
		 where @principal in ('', p.name, p.id::text) order by i.issuer, i.subject limit 1000`,
		postgres.Strict{"principal": principal})
}

func checkIdentity(issuer, subject string) error {
	for _, text := range []string{issuer, subject} {
		if text == "" || len(text) > 500 || strings.ContainsFunc(text, isOdd) {
			return fmt.Errorf("%w: issuer and subject have 1 to 500 printable characters without spaces", ErrInvalid)
		}
	}
	return nil
}

// LinkIdentity links an account to a principal, whose role it has from then on. Another principal's account is ErrTaken.
func LinkIdentity(ctx context.Context, db postgres.Beginner, principal, issuer, subject, reason string) error {
	if err := checkIdentity(issuer, subject); err != nil {
		return err
	}
	about := map[string]any{"principal": principal, "issuer": issuer, "subject": subject}
	return act(ctx, db, "link_identity", reason, about, func(tx pgx.Tx) (any, error) {
		p, err := locked(ctx, tx, principal)
		if err != nil {
			return nil, err
		}
		if p.Name == Root {
			return nil, fmt.Errorf("%w: root has no identities; link an admin of your own", ErrInvalid)
		}
		about["principal"] = p.Name
		tag, err := tx.Exec(ctx, `
			insert into agent_identities as i (issuer, subject, principal_id) values (@issuer, @subject, @id::uuid)
			on conflict (issuer, subject) do update set role_from_claims = false where i.principal_id = @id::uuid`,
			postgres.Strict{"issuer": issuer, "subject": subject, "id": p.ID})
		linked, err := postgres.Changed(tag, err, "link identity")
		if err == nil && !linked {
			err = fmt.Errorf("%w: this identity belongs to another principal; unlink it there", ErrTaken)
		}
		return nil, err
	})
}

// UnlinkIdentity removes the link of an account.
func UnlinkIdentity(ctx context.Context, db postgres.Beginner, principal, issuer, subject, reason string) error {
	if err := checkIdentity(issuer, subject); err != nil {
		return err
	}
	about := map[string]any{"principal": principal, "issuer": issuer, "subject": subject}
	return act(ctx, db, "unlink_identity", reason, about, func(tx pgx.Tx) (any, error) {
		tag, err := tx.Exec(ctx, `
			delete from agent_identities i using agent_principals p
			 where p.id = i.principal_id and @principal in (p.name, p.id::text) and i.issuer = @issuer and i.subject = @subject`,
			postgres.Strict{"principal": principal, "issuer": issuer, "subject": subject})
		gone, err := postgres.Changed(tag, err, "unlink identity")
		if err == nil && !gone {
			err = ErrNotFound
		}
		return nil, err
	})
}
