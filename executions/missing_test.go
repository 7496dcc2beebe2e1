package executions_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

func TestWhoAsksForWhatRetentionTookIsToldSo(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	p := prepare(t, pool, nil)
	old := value[string](t, pool, `select lanekeeper.agent_uuid7(clock_timestamp() - interval '31 days')::text`)
	recent := value[string](t, pool, `select lanekeeper.agent_uuid7(clock_timestamp() - interval '29 days')::text`)
	for _, c := range []struct{ after, id, says string }{
		{`select 1`, old, ""},
		{`update agent_retention set keep = '30 days' where kind = 'executions'`, old, ""}, // it has taken nothing yet
		{`update agent_retention_passes set removed = 1 where kind = 'executions'`, old, "; retention may have taken it away: it keeps what has ended for 30 days"},
		{`select 1`, recent, ""},
		{`update agent_retention set keep = null where kind = 'executions'`, recent, "; retention may have taken it away"},
	} {
		exec(t, pool, c.after)
		want := "execution " + c.id + ": no such execution" + c.says
		_, read := executions.Get(t.Context(), pool, c.id)
		_, forked := p.Fork(t.Context(), pool, executions.ForkSpec{ID: c.id})
		for what, err := range map[string]error{"read": read, "fork": forked} {
			if !errors.Is(err, executions.ErrNotFound) || !strings.HasSuffix(err.Error(), want) {
				t.Errorf("%s after %s: %v, want %s", what, c.after, err, want)
			}
		}
	}
	if _, err := executions.Get(t.Context(), pool, "nonsense"); !errors.Is(err, executions.ErrNotFound) {
		t.Errorf("an id that is none: %v", err)
	}
}
