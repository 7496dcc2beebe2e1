package reason_test

import (
	"fmt"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// One answer that calls a skill 25 times is that skill's spend; calls of what is no skill, and the answer in words, are the surface's.
func TestAModelCallIsChargedToWhatItsAnswerCalls(t *testing.T) {
	many := modeltest.Text("").WithUsage(900, 100, 0)
	for i := range 25 {
		many = many.AndCall("sizes", fmt.Sprintf(`{"limit":%d}`, i+1))
	}
	w := newWorld(t, many, modeltest.ToolCall("imagined", `{}`).WithUsage(10, 1, 0), modeltest.Text("Done.").WithUsage(20, 2, 0))
	x, _ := w.completed(t)
	spent := pgtest.Value[string](t, w.pool, `
		select string_agg(format('%s|%s|%s', s.skill, s.calls, s.tokens), ' ' order by s.skill) from agent_spend s where s.surface = $1`, x.Surface)
	if spent != "|2|33 sizes|1|1000" {
		t.Errorf("spent is %s", spent)
	}
	asked := pgtest.Value[string](t, w.pool, `
		select format('%s of %s, by %s', count(m.id), count(*), count(distinct m.id))
		  from agent_activity a left join agent_activity m on m.id = a.cause_id and m.kind = 'model'
		 where a.execution_id = $1 and a.kind = 'call'`, x.ID)
	if asked != "26 of 26, by 2" {
		t.Errorf("calls that name the model call behind them: %s", asked)
	}
}
