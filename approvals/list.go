package approvals

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// Get reads one approval; ErrNotFound when there is none.
func Get(ctx context.Context, db postgres.DB, id string) (Approval, error) {
	rows, err := db.Query(ctx, `select `+columns+` from agent_approvals a`+asker+` where a.id = @id`,
		postgres.Strict{"id": id})
	got, err := collectOne(rows, err)
	if err != nil {
		return Approval{}, fmt.Errorf("read approval %s: %w", id, err)
	}
	return got, nil
}

func collectOne(rows pgx.Rows, err error) (Approval, error) {
	if err != nil {
		return Approval{}, err
	}
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[Approval])
	if errors.Is(err, pgx.ErrNoRows) || postgres.IsCode(err, "22P02") {
		err = ErrNotFound
	}
	return got, err
}

// Filter narrows a listing. Zero values do not narrow; Limit defaults to 50 and is at most 500. Before is the id
// after which the listing goes on, newest first.
type Filter struct {
	Status, Skill, Before string
	TraceIDs              []trace.ID // what [trace.ParseAny] makes of one id
	Limit                 int
}

// List reads approvals, newest first. One whose time is over counts as expired.
func List(ctx context.Context, db postgres.DB, f Filter) ([]Approval, error) {
	if f.Limit <= 0 {
		f.Limit = 50
	}
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_approvals a`+asker+`
		 where (@status = ''
		        or (@status not in ('pending', 'approved', 'expired') and a.status = @status)
		        or (@status in ('pending', 'approved') and a.status = @status and a.expires_at > clock_timestamp())
		        or (@status = 'expired' and (a.status = 'expired'
		            or (a.status in ('pending', 'approved') and a.expires_at <= clock_timestamp()))))
		   and (@skill = '' or a.skill_name = @skill) and (@trace_ids::text[] is null or a.trace_id = any (@trace_ids))
		   and (@before = '' or a.id < nullif(@before, '')::uuid)
		 order by a.id desc limit @limit`,
		postgres.Strict{
			"status": f.Status, "skill": f.Skill, "trace_ids": f.TraceIDs, "before": f.Before, "limit": min(f.Limit, 500),
		})
	return collect(rows, err)
}

// Approved lists grants that nobody has used, that no execution waits for, and whose skill is in service and
// unchanged, oldest first: what a run that follows through may do.
func Approved(ctx context.Context, db postgres.DB, limit int) ([]Approval, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_approvals a`+asker+`
		 where a.status = 'approved' and not a.parked and a.expires_at > clock_timestamp()
		   and exists (select from agent_skills s
		                where s.name = a.skill_name and s.revision = a.skill_revision and s.enabled)
		 order by a.id limit @limit`, postgres.Strict{"limit": limit})
	return collect(rows, err)
}

// Pending lists what waits for a decision, oldest first.
func Pending(ctx context.Context, db postgres.DB, limit int) ([]Approval, error) {
	rows, err := db.Query(ctx, `
		select `+columns+` from agent_approvals a`+asker+`
		 where a.status = 'pending' and a.expires_at > clock_timestamp() order by a.id limit @limit`,
		postgres.Strict{"limit": limit})
	return collect(rows, err)
}

func collect(rows pgx.Rows, err error) ([]Approval, error) {
	if err != nil {
		return nil, fmt.Errorf("list approvals: %w", err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Approval])
	if err != nil {
		return nil, fmt.Errorf("list approvals: %w", err)
	}
	return got, nil
}
