package mcp

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
)

// Offer is a row of agent_mcp_offers: a skill that external clients may call over MCP.
type Offer struct {
	Skill     string    `json:"skill"`
	OfferedBy string    `json:"offered_by"`
	CreatedAt time.Time `json:"created_at"`
}

// Grant offers a skill over MCP. It returns false if the skill is offered already, and [skills.ErrNotFound] for an
// unknown skill. by is the admin. Grant records an activity.
func Grant(ctx context.Context, db postgres.Beginner, skill, by, agent string) (bool, error) {
	return changeOffer(ctx, db, "mcp_offer", skill, by, agent, func(tx pgx.Tx) (int64, error) {
		tag, err := tx.Exec(ctx, `
			insert into agent_mcp_offers (skill_name, offered_by) values (@skill, @by) on conflict (skill_name) do nothing`,
			postgres.Strict{"skill": skill, "by": by})
		return tag.RowsAffected(), err
	})
}

// Withdraw ends an offer. It returns false without an offer, and [skills.ErrNotFound] for an unknown skill. Pending
// calls continue. Withdraw records an activity.
func Withdraw(ctx context.Context, db postgres.Beginner, skill, by, agent string) (bool, error) {
	return changeOffer(ctx, db, "mcp_withdraw", skill, by, agent, func(tx pgx.Tx) (int64, error) {
		tag, err := tx.Exec(ctx, `delete from agent_mcp_offers where skill_name = @skill`, postgres.Strict{"skill": skill})
		return tag.RowsAffected(), err
	})
}

func changeOffer(
	ctx context.Context, db postgres.Beginner, activitySkill, skill, by, agent string,
	write func(tx pgx.Tx) (int64, error),
) (changed bool, err error) {
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if _, err := skills.Get(ctx, tx, skill); err != nil {
			return err
		}
		n, err := write(tx)
		if changed = n > 0; err != nil || !changed {
			return err
		}
		return recordActivity(ctx, tx, agent, activitySkill, map[string]any{"skill": skill, "by": by}, nil)
	})
	if err != nil {
		return false, fmt.Errorf("change the offer of skill %q: %w", skill, err)
	}
	return changed, nil
}

// Offers lists the offered skills by name.
func Offers(ctx context.Context, db postgres.DB) ([]Offer, error) {
	rows, err := db.Query(ctx, `select skill_name, offered_by, created_at from agent_mcp_offers order by skill_name`)
	return postgres.Collect(rows, err, "list offered skills", pgx.RowToStructByPos[Offer])
}

// isOffered reports whether external clients may call a skill now.
func isOffered(ctx context.Context, db postgres.DB, skill string) (offered bool, err error) {
	err = db.QueryRow(ctx, `select exists (select from agent_mcp_offers where skill_name = @skill)`,
		postgres.Strict{"skill": skill}).Scan(&offered)
	if err != nil {
		return false, fmt.Errorf("read the offer of skill %q: %w", skill, err)
	}
	return offered, nil
}

// offeredSkills returns the offered and enabled skills that the registry can run.
func (s *Server) offeredSkills(ctx context.Context) ([]skills.Skill, error) {
	offers, err := Offers(ctx, s.Pool)
	if err != nil || len(offers) == 0 {
		return nil, err
	}
	all, err := s.Skills.Available(ctx, s.Pool)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(skill skills.Skill) bool {
		return !slices.ContainsFunc(offers, func(o Offer) bool { return o.Skill == skill.Name })
	}), nil
}
