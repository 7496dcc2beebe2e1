package activity_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/trace"
)

// act is a row to insert, ago before now.
type act struct {
	trace, kind, skill, status, class, message, purpose, surface, model, lane, parent string
	ago                                                                               time.Duration
	ms                                                                                int
	tokens                                                                            int
	cost                                                                              string
	ledTo                                                                             map[string]int
	cause                                                                             string
}

// put inserts a row as any client that speaks SQL may, and returns its id.
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
		insert into agent_activity (id, trace_id, kind, skill_name, status, error_class, error_message, purpose, surface, model,
		       lane, parent_id, created_at, finished_at, duration_ms, token_usage, cost_usd, led_to, cause_id)
		select lanekeeper.agent_uuid7(at), @trace, @kind, @skill, @status, @class, nullif(@message::text, ''), @purpose, @surface, @model,
		       @lane, nullif(@parent::text, '')::uuid, at, case when @status::text <> 'running' then at end,
		       case when @status::text <> 'running' then @ms::bigint end, @usage, @cost::text::numeric,
		       coalesce(@led_to::jsonb, '{}'), nullif(@cause::text, '')::uuid
		  from (select clock_timestamp() - @ago::interval as at) x
		returning id::text`, postgres.Strict{
		"trace": or(a.trace, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE"), "kind": or(a.kind, "call"), "skill": or(a.skill, "fetch"),
		"status": or(a.status, "success"), "class": a.class, "message": a.message, "purpose": a.purpose,
		"surface": or(a.surface, "heartbeat"), "model": a.model, "lane": a.lane, "parent": a.parent, "ago": a.ago, "ms": a.ms,
		"usage": usage, "cost": or(a.cost, "0"), "led_to": a.ledTo, "cause": a.cause,
	}).Scan(&id)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func ids(rows []activity.Row) []string {
	list := []string{}
	for _, row := range rows {
		list = append(list, row.ID)
	}
	return list
}

func TestATraceIsInTheOrderInWhichItBegan(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	second := put(t, db, act{ago: time.Minute})
	first := put(t, db, act{ago: time.Hour})
	put(t, db, act{trace: string(trace.New(trace.Chat))})
	story, err := activity.TraceOf(t.Context(), db, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	if err != nil {
		t.Fatal(err)
	}
	rows := story.Activities
	if diff := cmp.Diff([]string{first, second}, ids(rows)); diff != "" {
		t.Error(diff)
	}
	if zone := rows[0].CreatedAt.Location(); zone != time.UTC {
		t.Errorf("times are in %s", zone)
	}
}

func TestARowHasExactlyTheColumnsOfTheTable(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	put(t, db, act{kind: "model", tokens: 7})
	story, err := activity.TraceOf(t.Context(), db, "hb_01JD3V7K8ZQ6W2M5T9X4C1B0AE")
	if err != nil {
		t.Fatal(err)
	}
	rows := story.Activities
	text, err := json.Marshal(rows[0])
	if err != nil {
		t.Fatal(err)
	}
	var differing []string
	err = db.QueryRow(t.Context(), `
		select coalesce(array_agg(coalesce(c.column_name, k.key)), '{}')
		  from (select column_name::text from information_schema.columns
		         where table_name = 'agent_activity' and table_schema = 'public') c
		  full join jsonb_object_keys($1::jsonb) k (key) on k.key = c.column_name
		 where c.column_name is null or k.key is null`, string(text)).Scan(&differing)
	if err != nil {
		t.Fatal(err)
	}
	if len(differing) > 0 {
		t.Errorf("table and JSON differ in %v", differing)
	}
	var got struct {
		ExecutionID    *string         `json:"execution_id"`
		ConversationID string          `json:"conversation_id"`
		TokenUsage     map[string]int  `json:"token_usage"`
		CostUSD        *float64        `json:"cost_usd"`
		Output         json.RawMessage `json:"output"`
	}
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	if got.ExecutionID != nil || string(got.Output) != "null" || got.CostUSD == nil || got.ConversationID != rows[0].TraceID {
		t.Errorf("row is %s", text)
	}
	if diff := cmp.Diff(map[string]int{"prompt_tokens": 6, "completion_tokens": 1, "total_tokens": 7}, got.TokenUsage); diff != "" {
		t.Error(diff)
	}
}

func TestRecentFilters(t *testing.T) {
	t.Parallel()
	db := pgtest.DB(t)
	_, err := db.Exec(t.Context(), `
		create table agent_activity_past partition of agent_activity for values from (lanekeeper.agent_uuid7_floor('2020-01-01 00:00Z'))
		  to (lanekeeper.agent_uuid7_floor(date_trunc('month', clock_timestamp() at time zone 'UTC') at time zone 'UTC' - interval '1 month'))`)
	if err != nil {
		t.Fatal(err)
	}
	op := string(trace.New(trace.Operate))
	a := put(t, db, act{ago: 40 * 24 * time.Hour, skill: "old"})
	b := put(t, db, act{ago: 3 * time.Hour, status: "error", lane: "heartbeat"})
	c := put(t, db, act{ago: 2 * time.Hour, kind: "model", trace: op, surface: "operate"})
	d := put(t, db, act{ago: time.Hour, status: "running", kind: "note"})
	if _, err := db.Exec(t.Context(), "insert into agent_activity_open (activity_id, kind) values ($1, 'note')", d); err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	for name, test := range map[string]struct {
		filter activity.Filter
		want   []string
	}{
		"nothing":       {activity.Filter{}, []string{d, c, b, a}},
		"surface":       {activity.Filter{Surface: "operate"}, []string{c}},
		"status":        {activity.Filter{Status: activity.Error}, []string{b}},
		"running":       {activity.Filter{Status: activity.Running}, []string{d}},
		"skill":         {activity.Filter{Skill: "old"}, []string{a}},
		"lane":          {activity.Filter{Lane: "heartbeat"}, []string{b}},
		"agent":         {activity.Filter{Agent: "visitor_chat"}, []string{}},
		"kinds":         {activity.Filter{Kinds: []activity.Kind{"call", "note"}, Since: now.AddDate(0, -2, 0)}, []string{d, b, a}},
		"kinds, 30 d":   {activity.Filter{Kinds: []activity.Kind{"call", "note"}}, []string{d, b}},
		"trace":         {activity.Filter{TraceID: op}, []string{c}},
		"trace in hex":  {activity.Filter{TraceID: trace.ID(op).OTel()}, []string{c}},
		"since":         {activity.Filter{Since: now.Add(-150 * time.Minute)}, []string{d, c}},
		"until":         {activity.Filter{Until: now.Add(-150 * time.Minute)}, []string{b, a}},
		"before 1970":   {activity.Filter{Since: time.Unix(-1e9, 0)}, []string{d, c, b, a}},
		"contradiction": {activity.Filter{Skill: "old", Surface: "chat"}, []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			rows, next, err := activity.Recent(t.Context(), db, test.filter)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, ids(rows)); diff != "" {
				t.Error(diff)
			}
			if next != "" {
				t.Errorf("the last page has a cursor: %s", next)
			}
		})
	}
}

// TestUntilIsToTheMicrosecond, though bounds on ids are milliseconds.
func TestUntilIsToTheMicrosecond(t *testing.T) {
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
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, id)
	}
	f := activity.Filter{Since: at.Add(300 * time.Microsecond), Until: at.Add(600 * time.Microsecond)}
	rows, _, err := activity.Recent(t.Context(), db, f)
	if diff := cmp.Diff(all[1:2], ids(rows)); diff != "" || err != nil {
		t.Errorf("recent: %s %v", diff, err)
	}
	list, err := activity.Lines(t.Context(), db, f)
	if err != nil || len(list.Lines) != 1 || list.Lines[0].ID != all[1] {
		t.Errorf("lines are %+v (%v)", list.Lines, err)
	}
}

func TestPagesDoNotShiftWhenRowsArrive(t *testing.T) {
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
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, ids(rows)...)
		f.Cursor = next
		put(t, db, act{})
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if f.Cursor != "" {
		t.Error("the last page has a cursor")
	}
}

func TestBadFiltersAreTheCallersFault(t *testing.T) {
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
			if _, _, err := activity.Recent(t.Context(), db, test.filter); !errors.Is(err, test.want) {
				t.Errorf("error is %v, not %v", err, test.want)
			}
		})
	}
}
