package activity_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/trace"
)

// act is a row to insert, created ago before now.
type act struct {
	trace, kind, skill, status, class, message, purpose, surface, model, lane, parent string
	ago                                                                               time.Duration
	ms                                                                                int
	tokens                                                                            int
	cost                                                                              string
	ledTo                                                                             map[string]int
	cause                                                                             string
}

// put inserts a row like any client of SQL, and returns its id.
func put(t *testing.T, db postgres.DB, a act) string {
	t.Helper()
	usage := "{}"
	if a.tokens > 0 {
		usage = fmt.Sprintf(`{"prompt_tokens": %d, "completion_tokens": 1, "total_tokens": %d}`, a.tokens-1, a.tokens)
	}
	or := func(s, other string) string {
		if s == "" {
			return other
		}
		return s
	}
	var id string
	err := db.QueryRow(t.Context(), `
		insert into agent_activity (id, trace_id, kind, skill_name, status, error_class, error_message, purpose, surface,
		  model, lane, parent_id, created_at, finished_at, duration_ms, token_usage, cost_usd, led_to, cause_id)
		select lanekeeper.agent_uuid7(at), @trace, @kind, @skill, @status, @class, nullif(@message::text, ''), @purpose,
		       @surface, @model, @lane, nullif(@parent::text, '')::uuid, at, case when @status::text <> 'running' then at end,
		       case when @status::text <> 'running' then @ms::bigint end, @usage, @cost::text::numeric,
		       coalesce(@led_to::jsonb, '{}'), nullif(@cause::text, '')::uuid
		  from (select clock_timestamp() - @ago::interval as at) x
		returning id::text`, postgres.Strict{
		"trace": or(a.trace, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"), "kind": or(a.kind, "call"), "skill": or(a.skill, "fetch"),
		"status": or(a.status, "success"), "class": a.class, "message": a.message, "purpose": a.purpose,
		"surface": or(a.surface, "heartbeat"), "model": a.model, "lane": a.lane, "parent": a.parent, "ago": a.ago, "ms": a.ms,
		"usage": usage, "cost": or(a.cost, "0"), "led_to": a.ledTo, "cause": a.cause,
	}).Scan(&id)
	require.NoError(t, err)
	return id
}

func ids(rows []activity.Row) []string {
	list := []string{}
	for _, row := range rows {
		list = append(list, row.ID)
	}
	return list
}

func TestTraceIsInStartOrder(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	second := put(t, db, act{ago: time.Minute})
	first := put(t, db, act{ago: time.Hour})
	put(t, db, act{trace: string(trace.New(trace.Chat))})
	story, err := activity.TraceOf(t.Context(), db, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	require.NoError(t, err)
	rows := story.Activities
	assert.NoDiff(t, []string{first, second}, ids(rows))
	assert.Equal(t, time.UTC, rows[0].CreatedAt.Location())
}

// A loop may act under one trace for years.
func TestLongTraceIsTruncated(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	first := put(t, db, act{ago: time.Hour})
	pgtest.Exec(t, db, `
		insert into agent_activity (trace_id, kind, skill_name, surface, token_usage, cost_usd)
		select 'hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'model', 'model_call', 'heartbeat', '{"total_tokens": 2}', 0.5
		  from generate_series(1, 20000)`)
	story, err := activity.TraceOf(t.Context(), db, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	require.NoError(t, err)
	assert.Equal(t, 20_000, len(story.Activities))
	assert.Equal(t, first, story.Activities[0].ID)
	assert.True(t, story.Truncated)
	assert.Equal(t, 40_000, story.Tokens)
	assert.Equal(t, 10_000, story.CostUSD)
	var text strings.Builder
	require.NoError(t, activity.WriteStory(&text, story, false))
	assert.True(t, strings.Contains(text.String(),
		"only the first 20000 activities are shown; see `agent activity ls --trace hb_01JD3V7K"), "the end of the story")
}

// Other programs write rows too, with any JSON.
func TestOddNumbersBreakNoListing(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	id := put(t, db, act{kind: "model"})
	for usage, want := range map[string]activity.Usage{
		`{"total_tokens": "12", "prompt_tokens": 3, "estimated": 1}`:      {PromptTokens: 3},
		`{"total_tokens": 12.5, "prompt_tokens": -3, "unknown_usd": "x"}`: {TotalTokens: 13},
		`{"total_tokens": 1e30, "estimated": true, "unknown_usd": 0.5}`:   {TotalTokens: 1e12, Estimated: true, UnknownUSD: 0.5},
		`[7]`:                                   {},
		`{"total_tokens": {"sum": 7}, "a": ""}`: {},
	} {
		pgtest.Exec(t, db, `update agent_activity set token_usage = $1, led_to = '{"a": "x", "b": 2}' where id = $2`, usage, id)
		story, err := activity.TraceOf(t.Context(), db, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
		require.NoError(t, err, usage)
		assert.NoDiff(t, want, story.Activities[0].TokenUsage)
		assert.NoDiff(t, activity.Counts{"a": 0, "b": 2}, story.Activities[0].LedTo)
		sums := pgtest.Value[int](t, db, `select lanekeeper.agent_tokens(token_usage, 'total_tokens') from agent_activity`)
		assert.Equal(t, sums, story.Activities[0].TokenUsage.TotalTokens, usage)
	}
}

func TestRowHasColumnsOfTable(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	put(t, db, act{kind: "model", tokens: 7})
	story, err := activity.TraceOf(t.Context(), db, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	require.NoError(t, err)
	rows := story.Activities
	text, err := json.Marshal(rows[0])
	require.NoError(t, err)
	var differing []string
	err = db.QueryRow(t.Context(), `
		select coalesce(array_agg(coalesce(c.column_name, k.key)), '{}')
		  from (select column_name::text from information_schema.columns
		         where table_name = 'agent_activity' and table_schema = 'public') c
		  full join jsonb_object_keys($1::jsonb) k (key) on k.key = c.column_name
		 where c.column_name is null or k.key is null`, string(text)).Scan(&differing)
	require.NoError(t, err)
	assert.Truef(t, len(differing) == 0, "table and JSON differ in %v", differing)
	var got struct {
		ExecutionID    *string         `json:"execution_id"`
		ConversationID string          `json:"conversation_id"`
		TokenUsage     map[string]int  `json:"token_usage"`
		CostUSD        *float64        `json:"cost_usd"`
		Output         json.RawMessage `json:"output"`
	}
	require.NoError(t, json.Unmarshal(text, &got))
	assert.Truef(t, got.ExecutionID == nil && string(got.Output) == "null" && got.CostUSD != nil &&
		got.ConversationID == rows[0].TraceID, "row is %s", text)
	assert.NoDiff(t, map[string]int{"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}, got.TokenUsage)
}

func TestRecentFilters(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	pgtest.Exec(t, db, `
		create table agent_activity_past partition of agent_activity for values
		  from (lanekeeper.agent_uuid7_floor('2020-01-01 00:00Z'))
		  to (lanekeeper.agent_uuid7_floor(date_trunc('month',
		    clock_timestamp() at time zone 'UTC') at time zone 'UTC' - interval '1 month'))`)
	op := string(trace.New(trace.Operate))
	old := string(trace.New(trace.Flow))
	a := put(t, db, act{ago: 40 * 24 * time.Hour, skill: "old", trace: old})
	b := put(t, db, act{ago: 3 * time.Hour, status: "error", lane: "heartbeat"})
	c := put(t, db, act{ago: 2 * time.Hour, kind: "model", trace: op, surface: "operate"})
	d := put(t, db, act{ago: time.Hour, status: "running", kind: "note"})
	pgtest.Exec(t, db, "insert into agent_activity_open (activity_id, kind) values ($1, 'note')", d)
	now := time.Now()
	for name, test := range map[string]struct {
		filter activity.Filter
		want   []string
	}{
		"nothing": {activity.Filter{}, []string{d, c, b, a}},
		"surface": {activity.Filter{Surface: "operate"}, []string{c}},
		"status":  {activity.Filter{Status: activity.Error}, []string{b}},
		"running": {activity.Filter{Status: activity.Running}, []string{d}},
		"skill":   {activity.Filter{Skill: "old"}, []string{a}},
		"lane":    {activity.Filter{Lane: "heartbeat"}, []string{b}},
		"agent":   {activity.Filter{Agent: "visitor_chat"}, []string{}},
		"kinds": {
			activity.Filter{Kinds: []activity.Kind{"call", "note"}, Since: now.AddDate(0, -2, 0)}, []string{d, b, a},
		},
		"kinds, 30 d":   {activity.Filter{Kinds: []activity.Kind{"call", "note"}}, []string{d, b}},
		"trace":         {activity.Filter{TraceID: op}, []string{c}},
		"trace in hex":  {activity.Filter{TraceID: trace.ID(op).OTel()}, []string{c}},
		"old trace":     {activity.Filter{TraceIDs: []string{old}, Kinds: []activity.Kind{"call"}}, []string{a}},
		"since":         {activity.Filter{Since: now.Add(-150 * time.Minute)}, []string{d, c}},
		"until":         {activity.Filter{Until: now.Add(-150 * time.Minute)}, []string{b, a}},
		"before 1970":   {activity.Filter{Since: time.Unix(-1e9, 0)}, []string{d, c, b, a}},
		"contradiction": {activity.Filter{Skill: "old", Surface: "chat"}, []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			rows, next, err := activity.Recent(t.Context(), db, test.filter)
			require.NoError(t, err)
			assert.NoDiff(t, test.want, ids(rows))
			assert.Equal(t, "", next)
		})
	}
}

// TestUntilHasMicrosecondPrecision: ids have milliseconds, but the bound is exact.
func TestUntilHasMicrosecondPrecision(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	at := time.Now().Truncate(time.Millisecond).Add(-time.Minute)
	var all []string
	for us := range 3 {
		var id string
		err := db.QueryRow(t.Context(), `
			insert into agent_activity (id, trace_id, skill_name, status, created_at, finished_at)
			values (lanekeeper.agent_uuid7($1), $2, 'x', 'success', $1, $1) returning id::text`,
			at.Add(time.Duration(300*us)*time.Microsecond), string(trace.New(trace.Flow))).Scan(&id)
		require.NoError(t, err)
		all = append(all, id)
	}
	f := activity.Filter{Since: at.Add(300 * time.Microsecond), Until: at.Add(600 * time.Microsecond)}
	rows, _, err := activity.Recent(t.Context(), db, f)
	diff := cmp.Diff(all[1:2], ids(rows))
	assert.Truef(t, diff == "" && err == nil, "recent: %s %v", diff, err)
	list, err := activity.Lines(t.Context(), db, f)
	assert.Truef(t, err == nil && len(list.Lines) == 1 && list.Lines[0].ID == all[1],
		"lines are %+v (%v)", list.Lines, err)
}

func TestPagesDoNotShiftUnderInserts(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	var want []string
	for i := range 5 {
		want = append(want, put(t, db, act{ago: time.Duration(i+1) * time.Minute}))
	}
	var got []string
	f := activity.Filter{Limit: 2}
	for range 3 {
		rows, next, err := activity.Recent(t.Context(), db, f)
		require.NoError(t, err)
		got = append(got, ids(rows)...)
		f.Cursor = next
		put(t, db, act{})
	}
	assert.NoDiff(t, want, got)
	assert.Equal(t, "", f.Cursor)
}

func TestInvalidFiltersAreCallerErrors(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	for name, test := range map[string]struct {
		filter activity.Filter
		want   error
	}{
		"cursor":       {activity.Filter{Cursor: "%%%"}, activity.ErrCursor},
		"other cursor": {activity.Filter{Cursor: "b3RoZXI"}, activity.ErrCursor},
		"trace":        {activity.Filter{TraceID: "42"}, trace.ErrInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := activity.Recent(t.Context(), db, test.filter)
			assert.ErrorIs(t, err, test.want)
		})
	}
}

// walk reads all pages of a listing.
func walk(t *testing.T, db postgres.DB, f activity.Filter) (ids []string, pages, partial int) {
	t.Helper()
	for {
		got, err := activity.Lines(t.Context(), db, f)
		require.NoError(t, err)
		pages++
		if got.Partial {
			partial++
		}
		for _, line := range got.Lines {
			ids = append(ids, line.ID)
		}
		if got.Next == "" {
			return ids, pages, partial
		}
		f.Cursor = got.Next
	}
}

func TestLinesReadBoundedWindows(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	fill(t, db)
	pgtest.Exec(t, db, `
		update agent_activity set agent = 'rare' where id in (
		  (select id from agent_activity order by id limit 2)
		    union all (select id from agent_activity order by id desc limit 1))`)
	ids, pages, partial := walk(t, db, activity.Filter{Agent: "rare"})
	assert.Truef(t, len(ids) == 3 && pages == 3 && partial == 2,
		"found %d on %d pages, %d of them partial; want 3 on 3, 2", len(ids), pages, partial)
	ids, pages, _ = walk(t, db, activity.Filter{Agent: "nobody"})
	assert.Truef(t, len(ids) == 0 && pages == 3, "found %d on %d pages, want none on 3", len(ids), pages)
	ids, _, partial = walk(t, db, activity.Filter{Limit: 500})
	assert.Truef(t, len(ids) == 24_000 && partial == 0, "found %d, %d partial; want all and none", len(ids), partial)
	seen := map[string]bool{}
	ids, _, _ = walk(t, db, activity.Filter{Surface: "chat", Limit: 500})
	assert.Equal(t, 4800, len(ids), "of chat")
	for i, id := range ids {
		require.Truef(t, !seen[id] && (i <= 0 || id <= ids[i-1]), "%s comes twice or out of order", id)
		seen[id] = true
	}
	pgtest.Exec(t, db, `update agent_activity set surface = 'eval'
		where id in (select id from agent_activity order by id desc limit $1)`, activity.Window)
	ids, _, partial = walk(t, db, activity.Filter{NoEvals: true, Limit: 500})
	assert.Equal(t, 24_000-activity.Window, len(ids), "rows beside evals")
	assert.Equal(t, 1, partial)
}

func TestLinesAndDetailsAreTruncatedInDatabase(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	var id string
	err := db.QueryRow(t.Context(), `
		insert into agent_activity (trace_id, skill_name, purpose, lane, input, output, error_message, token_usage)
		values ('hb_00000000000000000000000001', 'look', repeat('p', 1000000), repeat('l', 1000000),
		  to_jsonb(repeat('i', 1000000)), to_jsonb(repeat('o', 1000000)), repeat('e', 1000000),
		  '{"total_tokens": "many", "prompt_tokens": 1e30, "completion_tokens": 7}')
		returning id::text`).Scan(&id)
	require.NoError(t, err)
	got, err := activity.Lines(t.Context(), db, activity.Filter{})
	require.Truef(t, err == nil && len(got.Lines) == 1, "%+v, %v", got, err)
	line := got.Lines[0]
	assert.Truef(t, len(line.Purpose) == 300 && len(line.Lane) == 300 && len(line.ErrorMessage) == 300 && line.Tokens == 0,
		"purpose %d, lane %d, error %d, tokens %d", len(line.Purpose), len(line.Lane), len(line.ErrorMessage), line.Tokens)
	more, err := activity.ReadDetails(t.Context(), db, id)
	assert.Truef(t, err == nil && len(more.Input) == 4000 && more.InputSize == 1000002 && len(more.Output) == 4000 &&
		more.ErrorSize == 1000000 && more.PromptTokens == 1e12 && more.AnswerTokens == 7, "got %.200s, %v",
		strings.Join([]string{more.Input, more.Output}, " "), err)
	for _, none := range []string{"", "x", "018f0000-0000-7000-8000-000000000000"} {
		_, err := activity.ReadDetails(t.Context(), db, none)
		assert.ErrorIs(t, err, activity.ErrNoRow, none)
	}
}

// explainer has the server explain each passing query with its arguments.
type explainer struct {
	postgres.DB
	t     *testing.T
	plans []string
}

func (e *explainer) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	e.plans = append(e.plans, strings.Join(pgtest.Column[string](e.t, e.DB, "explain "+sql, args...), "\n"))
	return e.DB.Query(ctx, sql, args...)
}

// fill inserts 24,000 rows and 4,000 executions, evenly since the beginning of last month.
func fill(t *testing.T, db postgres.DB) {
	t.Helper()
	pgtest.Exec(t, db, `
		create temp table since as select clock_timestamp() as now,
		       clock_timestamp() - (date_trunc('month',
		         clock_timestamp() at time zone 'UTC') - interval '1 month') at time zone 'UTC' as span;
		insert into agent_activity (id, trace_id, kind, skill_name, status, error_class, surface, token_usage, created_at,
		       finished_at, duration_ms)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad((n / 6)::text, 26, '0'), case n % 6 when 0 then 'model'
		  else 'call' end,
		       'skill_' || n % 97, case n % 11 when 0 then 'error' else 'success' end, '',
		       case n % 5 when 0 then 'chat' else 'heartbeat' end, '{"total_tokens": 5}', at, at, n % 1000
		  from (select n, now - span * n / 24001 as at from since, generate_series(1, 24000) n) x;
		insert into agent_executions (id, trace_id, surface, flow, status, created_at)
		select lanekeeper.agent_uuid7(at), 'hb_' || lpad(n::text, 26, '0'), case n % 5 when 0 then 'chat'
		  else 'heartbeat' end, 'beat',
		       'pending', at
		  from (select n, now - span * n / 4001 as at from since, generate_series(1, 4000) n) x;
		drop table since;
		analyze agent_activity; analyze agent_executions; analyze agent_activity_open`)
}

// largePartitions lists the partitions with many rows. A scan is best for a small one, as at the beginning of a month.
func largePartitions(t *testing.T, db postgres.DB) []string {
	t.Helper()
	return pgtest.Column[string](t, db,
		"select tableoid::regclass::text from agent_activity group by tableoid having count(*) > 5000")
}

func TestEveryQueryUsesIndex(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	fill(t, db)
	scanned := regexp.MustCompile(`Seq Scan on (agent_executions|` + strings.Join(largePartitions(t, db), "|") + ")")
	day := time.Now().Add(-24 * time.Hour)
	recent := func(f activity.Filter) func(postgres.DB) error {
		return func(db postgres.DB) error {
			_, _, err := activity.Recent(t.Context(), db, f)
			return err
		}
	}
	lines := func(f activity.Filter) func(postgres.DB) error {
		return func(db postgres.DB) error {
			_, err := activity.Lines(t.Context(), db, f)
			return err
		}
	}
	traces := func(f activity.TraceFilter) func(postgres.DB) error {
		return func(db postgres.DB) error {
			_, _, err := activity.Traces(t.Context(), db, f)
			return err
		}
	}
	for name, query := range map[string]func(postgres.DB) error{
		"lines":            lines(activity.Filter{}),
		"lines of a lane":  lines(activity.Filter{Lane: "none"}),
		"lines of a trace": lines(activity.Filter{TraceID: "hb_00000000000000000000000042"}),
		"lines of a skill": lines(activity.Filter{Skill: "skill_3", Status: activity.Error}),
		"unfold": func(db postgres.DB) error {
			_, err := activity.ReadDetails(t.Context(), db, "018f0000-0000-7000-8000-000000000000")
			if errors.Is(err, activity.ErrNoRow) {
				err = nil
			}
			return err
		},
		"newest":  recent(activity.Filter{}),
		"trace":   recent(activity.Filter{TraceID: trace.ID("hb_00000000000000000000000042").OTel()}),
		"skill":   recent(activity.Filter{Skill: "skill_3"}),
		"running": recent(activity.Filter{Status: activity.Running}),
		"chat":    recent(activity.Filter{Surface: "chat", Status: activity.Error}),
		"a day":   recent(activity.Filter{Since: day, Until: day.Add(time.Hour)}),
		"trace of": func(db postgres.DB) error {
			_, err := activity.TraceOf(t.Context(), db, "hb_00000000000000000000000042")
			return err
		},
		"traces":            traces(activity.TraceFilter{}),
		"traces of chat":    traces(activity.TraceFilter{Surface: "chat"}),
		"traces of a state": traces(activity.TraceFilter{Status: "failed"}),
		"traces of a day":   traces(activity.TraceFilter{Since: day}),
		"audit": func(db postgres.DB) error {
			_, err := activity.Audit(t.Context(), db, activity.Filter{Since: day, Limit: 10})
			return err
		},
		"audit of a trace": func(db postgres.DB) error {
			_, err := activity.Audit(t.Context(), db, activity.Filter{TraceID: "hb_00000000000000000000000042"})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := &explainer{DB: db, t: t}
			require.NoError(t, query(e))
			for _, plan := range e.plans {
				assert.Truef(t, !scanned.MatchString(plan), "the table is read whole:\n%s", plan)
			}
			assert.True(t, len(e.plans) > 0, "nothing was asked")
		})
	}
}

// After a few uses, a prepared statement gets one plan for all arguments. That plan reads everything.
func TestPlansAreNotCached(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	for range 8 {
		_, _, err := activity.Recent(t.Context(), conn, activity.Filter{Skill: "fetch"})
		require.NoError(t, err)
	}
	var kept int
	err = conn.QueryRow(t.Context(), `
		select count(*) from pg_prepared_statements where statement like '%from agent_activity a%where%limit%'
		   and statement not like '%pg_prepared_statements%'`).Scan(&kept)
	require.NoError(t, err)
	assert.Truef(t, kept == 0, "%d statements are prepared", kept)
}

// A model call is charged to the skills that its answer calls, by their calls. Nothing is lost or counted twice.
func TestModelCallIsChargedToItsSkills(t *testing.T) {
	t.Parallel()
	pgtest.AvoidMidnight(t)
	db := pgtest.DB(t)
	day := 24 * time.Hour
	put(t, db, act{
		kind: "model", skill: "model", purpose: "turn", model: "m1", tokens: 100, cost: "0.10", ago: day,
		ledTo: map[string]int{"fetch": 25},
	})
	put(t, db, act{
		kind: "model", skill: "model", purpose: "turn", model: "m1", tokens: 50, cost: "0.05",
		ledTo: map[string]int{"fetch": 1, "note": 2},
	})
	put(t, db, act{kind: "model", skill: "model", purpose: "turn", model: "m1", tokens: 5, cost: "0.000001"})
	put(t, db, act{
		kind: "model", skill: "model", purpose: "turn", model: "m1", status: "error", class: "model",
		ledTo: map[string]int{"fetch": 0},
	})
	put(t, db, act{kind: "call", skill: "fetch", tokens: 999})
	put(t, db, act{kind: "model", skill: "ancient", model: "m1", tokens: 1000, ago: 20 * day})

	filter := activity.ReportFilter{Since: time.Now().Add(-3 * day)}
	got, next, err := activity.Spend(t.Context(), db, filter)
	require.True(t, err == nil && next == "", err, next)
	today, before := time.Now().UTC().Format(time.DateOnly), time.Now().UTC().Add(-day).Format(time.DateOnly)
	want := []activity.Spending{
		{
			Day: today, Skill: "note", Surface: "heartbeat", Model: "m1", Calls: 1, PromptTokens: 33, CompletionTokens: 1,
			Tokens: 34, CostUSD: 0.033333,
		},
		{Day: today, Skill: "fetch", Surface: "heartbeat", Model: "m1", PromptTokens: 16, Tokens: 16, CostUSD: 0.016667},
		{
			Day: today, Surface: "heartbeat", Model: "m1", Calls: 2, PromptTokens: 4, CompletionTokens: 1,
			Tokens: 5, CostUSD: 0.000001,
		},
		{
			Day: before, Skill: "fetch", Surface: "heartbeat", Model: "m1", Calls: 1, PromptTokens: 99, CompletionTokens: 1,
			Tokens: 100, CostUSD: 0.1,
		},
	}
	assert.NoDiff(t, want, got)
	purposes, _, err := activity.SpendByPurpose(t.Context(), db, filter)
	want = []activity.Spending{
		{
			Day: today, Purpose: "turn", Surface: "heartbeat", Model: "m1", Calls: 3, PromptTokens: 53, CompletionTokens: 2,
			Tokens: 55, CostUSD: 0.050001,
		},
		{
			Day: before, Purpose: "turn", Surface: "heartbeat", Model: "m1", Calls: 1, PromptTokens: 99, CompletionTokens: 1,
			Tokens: 100, CostUSD: 0.1,
		},
	}
	diff := cmp.Diff(want, purposes)
	assert.True(t, diff == "" && err == nil, diff, err)
	filter.Skill, filter.Limit = "fetch", 1
	first, next, err := activity.Spend(t.Context(), db, filter)
	require.Truef(t, err == nil && len(first) == 1 && next != "", "the first page is %+v, %q (%v)", first, next, err)
	filter.Cursor = next
	second, next, err := activity.Spend(t.Context(), db, filter)
	assert.Truef(t, err == nil && len(second) == 1 && second[0].Day == before && next == "",
		"the second page is %+v, %q (%v)", second, next, err)
	_, _, err = activity.SpendByPurpose(t.Context(), db, filter)
	assert.ErrorIs(t, err, activity.ErrSkillOrPurpose, "by a skill and by purpose")
}

// skillsThatAre declares skills.
func skillsThatAre(t *testing.T, db postgres.DB, names ...string) {
	t.Helper()
	pgtest.Exec(t, db, `
		insert into agent_skills (name, tool_definition, handler, enabled_at) select n, '{}', 'builtin:x', 'epoch'
		  from unnest($1::text[]) n`, names)
}

func TestSlowestOrdersByP95(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	skillsThatAre(t, db, "steady", "spiky", "waits", "idle")
	put(t, db, act{skill: "reasoning", ms: 1e6, status: "error", class: "stall"})
	put(t, db, act{skill: "imagined", ms: 1e6, status: "error", class: "unknown_tool"})
	put(t, db, act{skill: "no_skill", ms: 1e6})
	for i := range 20 {
		put(t, db, act{skill: "steady", ms: 900})
		put(t, db, act{skill: "spiky", ms: 10 + 2000*(i/18)})
	}
	put(t, db, act{skill: "spiky", ms: 99999, trace: "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE"})
	put(t, db, act{skill: "waits", ms: 1e6, status: "pending_approval"})
	got, next, err := activity.Slowest(t.Context(), db, activity.ReportFilter{Since: time.Now().Add(-time.Hour)})
	require.True(t, err == nil && next == "", err)
	want := []activity.Slow{
		{
			Skill: "spiky", Calls: 21, P50MS: 10, P95MS: 2010, MaxMS: new(int64(99999)),
			SlowestTraceID: "op_01JD3V7K8ZQ6W2M5T9X4C1B0AE",
		},
		{
			Skill: "steady", Calls: 20, P50MS: 900, P95MS: 900, MaxMS: new(int64(900)),
			SlowestTraceID: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE",
		},
	}
	assert.NoDiff(t, want, got)
}

func TestFailingCountsFailuresOfSelfHeal(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	skillsThatAre(t, db, "fetch", "always", "healthy")
	at := func(minutes int, status, class, message string) {
		put(t, db, act{
			skill: "fetch", ago: time.Duration(minutes) * time.Minute, status: status, class: class,
			message: message, ms: 20,
		})
	}
	at(50, "error", "timeout", "first")
	at(40, "success", "", "")
	at(30, "error", "http_status", "second")
	at(20, "error", "timeout", "last")
	at(10, "error", "invalid_params", "the model's")
	at(5, "skipped", "", "")
	put(t, db, act{skill: "always", status: "error", class: "timeout", message: "no"})
	put(t, db, act{skill: "healthy"})
	put(t, db, act{skill: "no_skill", status: "error", class: "timeout"})
	got, _, err := activity.Failing(t.Context(), db, activity.ReportFilter{Since: time.Now().Add(-time.Hour)})
	require.NoError(t, err)
	want := []activity.Failure{
		{
			Skill: "fetch", Calls: 4, Errors: 3, Rate: 0.75, Streak: 2, P50MS: 20, P95MS: 20, LastError: "last",
			LastClass: "timeout", LastTrace: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE", State: "enabled",
		},
		{
			Skill: "always", Calls: 1, Errors: 1, Rate: 1, Streak: 1, LastError: "no", LastClass: "timeout",
			LastTrace: "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE", State: "enabled",
		},
	}
	assert.NoDiff(t, want, got, cmpopts.IgnoreFields(activity.Failure{}, "LastFailed"))
	ago := time.Since(*got[0].LastFailed)
	assert.Truef(t, ago >= 19*time.Minute && ago <= 21*time.Minute, "last failed %s ago", ago)
}

func TestMain(m *testing.M) { pgtest.Main(m) }
