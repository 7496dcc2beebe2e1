package heartbeat

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/reason"
)

// reflect reviews the last 7 days if there is news since the last review.
func (b *heartbeatRun) reflect(ctx context.Context) (phaseResult, error) {
	record, err := executions.Step(ctx, "performance", func(ctx context.Context) (performance, error) {
		return readPerformance(ctx, b.Pool)
	})
	if err != nil {
		return phaseResult{}, err
	}
	if record.News == 0 {
		return phaseResult{Idle: true, Summary: "nothing new since the last reflection"}, nil
	}
	var notes []memoryNote
	outcome, err := b.Loop.Run(ctx, reason.Turn{
		Purpose: "reflect", BudgetScope: budgetScope(ctx, "reflect"),
		System: "You look back on how an autonomous agent performed. Be brief and concrete. " +
			"Use the tool remember for each lesson that will matter later; call nothing else.",
		Prompt: b.reflectionPrompt(record),
		Tools:  []reason.Tool{rememberTool(&notes)},
	})
	if err != nil {
		return phaseResult{Memories: notes}, err
	}
	return phaseResult{Summary: "reflected on 7 days: " + firstLine(outcome.Text), Memories: notes}, nil
}

// performance sums up the last 7 days.
type performance struct {
	News   int64         `json:"news"` // since the last reflection, including this heartbeat
	Skills []skillRecord `json:"skills"`
	Tokens int64         `json:"tokens"`
	Cost   float64       `json:"cost_usd"`
}

type skillRecord struct {
	Skill         string   `json:"skill"`
	Calls         int64    `json:"calls"`
	Rate          *float64 `json:"success_rate"`
	FailureStreak int64    `json:"streak"`
	P50           *float64 `json:"p50_ms"`
	State         string   `json:"state"`
}

func (b *heartbeatRun) reflectionPrompt(record performance) string {
	var p strings.Builder
	p.WriteString("Reflect on the last 7 days of your own performance.\n\n")
	if len(b.summaries) > 0 {
		fmt.Fprintf(&p, "This heartbeat so far: %s.\n\n", strings.Join(b.summaries, "; "))
	}
	if b.report != "" {
		fmt.Fprintf(&p, "Healing report:\n%s\n\n", b.report)
	}
	fmt.Fprintf(&p, "Model tokens: %d, cost: %.4f USD.\nSkills:\n", record.Tokens, record.Cost)
	for _, s := range record.Skills {
		rate := "no calls"
		if s.Rate != nil {
			rate = fmt.Sprintf("%s, %.0f %% succeeded, %s in a row", human.Counted(s.Calls, "call"), *s.Rate*100,
				human.Counted(s.FailureStreak, "failure"))
		}
		fmt.Fprintf(&p, "- %s (%s): %s\n", s.Skill, s.State, rate)
	}
	return p.String()
}

// readPerformance reads the performance. News counts the model's tool calls, the failed calls and the healed skills
// since the last review, at most 7 days. Successful automations without a model cause no review. Without news it reads
// nothing else.
func readPerformance(ctx context.Context, db postgres.DB) (performance, error) {
	var p performance
	since := time.Now().Add(-7 * 24 * time.Hour)
	err := db.QueryRow(ctx, `
		with last as (
		  select coalesce(max(r.id::text)::uuid, lanekeeper.agent_uuid7_floor(@since)) as id
		    from (select a.id from agent_activity a
		           where a.skill_name = 'reflect' and a.kind = 'phase' and a.status = 'success'
		             and a.id >= lanekeeper.agent_uuid7_floor(@since)
		           order by a.id desc limit 1) r)
		select count(*)
		  from (select from agent_activity a
		         where a.id > (select id from last)
		           and (a.kind = 'note' and a.skill_name = 'heal_skill'
		             or a.kind = 'call' and a.purpose <> 'reflect'
		               and (a.cause_id is not null or a.status in ('error', 'unknown'))) limit 1000) n`,
		postgres.Strict{"since": since}).Scan(&p.News)
	if err != nil {
		return p, fmt.Errorf("measure performance: %w", err)
	}
	if p.News == 0 {
		return p, nil
	}
	spend, err := activity.CountedSpend(ctx, db, activity.SpendFilter{By: activity.Together, Since: since})
	if err != nil {
		return p, fmt.Errorf("measure spend: %w", err)
	}
	for _, l := range spend.Lines {
		p.Tokens, p.Cost = p.Tokens+l.Tokens, p.Cost+l.CostUSD
	}
	health, err := activity.CountedHealth(ctx, db, activity.HealthFilter{Limit: 100})
	if err != nil {
		return p, fmt.Errorf("measure skills: %w", err)
	}
	for _, h := range health.Lines {
		p.Skills = append(p.Skills, skillRecord{h.Skill, h.Calls, h.SuccessRate, h.Streak, h.P50MS, h.State})
	}
	return p, nil
}

// firstLine returns the first line of a text, cut to 200 characters.
func firstLine(text string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(text), "\n")
	if r := []rune(line); len(r) > 200 {
		line = string(r[:200]) + "…"
	}
	return line
}
