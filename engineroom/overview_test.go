package engineroom

import (
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

func TestAnEmptyOverviewSaysWhatToDo(t *testing.T) {
	t.Parallel()
	_, server := open(t)
	shows(t, server.URL+"/", "Nothing runs at this moment", "Nothing needs you.", "has not done anything yet", "No lane is held",
		"works towards nothing", "Nothing is remembered yet")
	shows(t, server.URL+"/?surface=chat", "No activity is one of these")
}

func TestTheOverviewShowsWhatRuns(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	worker := put(t, pool, `insert into agent_workers (expires_at) values (clock_timestamp() + interval '1 hour') returning id::text`)
	dead := put(t, pool, `insert into agent_workers (expires_at) values (clock_timestamp() - interval '1 hour') returning id::text`)
	run := put(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		values ('hb_00000000000000000000000001', 'heartbeat', 'beat', 'running', $1, 1) returning id::text`, worker)
	lost := put(t, pool, `
		insert into agent_executions (trace_id, surface, flow, status, claimed_by, claim)
		values ('hb_00000000000000000000000002', 'heartbeat', 'beat', 'running', $1, 1) returning id::text`, dead)
	put(t, pool, `insert into agent_executions (trace_id, surface, flow) values ('fl_00000000000000000000000003', 'flow', 'later') returning id::text`)
	for _, name := range []string{"reflect", "fetch_prices"} {
		call := put(t, pool, `
			insert into agent_activity (trace_id, execution_id, skill_name, status) values ('hb_00000000000000000000000001', $1, $2, 'running')
			returning id::text`, run, name)
		put(t, pool, `insert into agent_activity_open (activity_id, execution_id, kind) values ($1, $2, 'call') returning 'x'`, call, run)
	}
	loose := put(t, pool, `
		insert into agent_activity (trace_id, skill_name, status) values ('op_00000000000000000000000004', 'apply_workspace', 'running') returning id::text`)
	put(t, pool, `insert into agent_activity_open (activity_id, kind) values ($1, 'call') returning 'x'`, loose)
	body := shows(t, server.URL+"/", "reflect › fetch_prices", "/executions/"+run, "apply_workspace", "outside of a run",
		`<a href="/executions?status=pending">1 ready</a>`)
	if strings.Contains(body, lost) {
		t.Error("a run whose worker is gone is said to run")
	}
}

func TestTheOverviewShowsLocks(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	put(t, pool, `select try_acquire_agent_lock('pipeline:prices', 'somebody', 60)::text`)
	put(t, pool, `select try_acquire_agent_lock('pipeline:over', 'another', 60)::text`)
	put(t, pool, `update agent_locks set expires_at = clock_timestamp() - interval '1 s' where lane = 'pipeline:over' returning lane`)
	put(t, pool, `insert into agent_lock_waiters (lane, owner, expires_at) values ('pipeline:prices', 'a', clock_timestamp() + interval '1 hour') returning lane`)
	put(t, pool, `insert into agent_lock_waiters (lane, owner, expires_at) values ('pipeline:prices', 'b', clock_timestamp() - interval '1 hour') returning lane`)
	body := shows(t, server.URL+"/", "pipeline:prices", "somebody", `<a href="/lanes">1<span class="aside-text"> waiting for pipeline:prices`)
	if strings.Contains(body, "pipeline:over") {
		t.Error("a lane whose lease is over is said to be held")
	}
}

// waitsForPeople makes one of each kind that needs a person, with a text in every field that may have it.
func waitsForPeople(t *testing.T, pool *pgxpool.Pool, text string) {
	t.Helper()
	run := put(t, pool, `
		insert into agent_executions (trace_id, surface, flow) values ('fl_00000000000000000000000001', 'flow', $1) returning id::text`, text)
	put(t, pool, `update agent_executions set status = 'running' where id = $1 returning id::text`, run)
	put(t, pool, `
		update agent_executions set status = 'waiting', waiting_for = 'event', waiting_key = 'k', wait_number = 1,
		       waiting_until = clock_timestamp() - interval '3 hours', updated_at = clock_timestamp() - interval '3 hours'
		 where id = $1 returning id::text`, run)
	if _, err := pool.Exec(t.Context(), `
		alter table agent_executions disable trigger user;
		update agent_executions set updated_at = clock_timestamp() - interval '3 hours' where status = 'waiting';
		alter table agent_executions enable trigger user`); err != nil {
		t.Fatal(err)
	}
	put(t, pool, `
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		values ('hb_00000000000000000000000001', $1, 1, '{}', 'x', clock_timestamp() + interval '1 day') returning id::text`, text)
	put(t, pool, `
		insert into agent_requests (kind, execution_id, trace_id, title) values ('signature', $1, 'fl_1', $2) returning id::text`, run, text)
	put(t, pool, `insert into agent_objectives (name, goal, status, proposed_by) values ($1, $1, 'proposed', 'agent') returning id::text`, text)
	put(t, pool, `
		insert into agent_memory_conflicts (category, key, value, if_revision, found_revision, trace_id)
		values ('general', left($1, 200), to_jsonb($1::text), 0, 0, 'hb_1') returning id::text`, text)
	put(t, pool, `
		insert into agent_automations (name, description, prompt, enabled, disabled_by, proposed_by)
		values ($1, $1, 'look', false, 'proposal', 'agent') returning id::text`, text)
	put(t, pool, `
		insert into agent_skills (name, tool_definition, handler, enabled, disabled_by, disabled_reason, disabled_at)
		values ('fetch', '{}', 'builtin:x', false, 'self-heal', $1, clock_timestamp()) returning id::text`, text)
	automation := put(t, pool, `insert into agent_automations (name, prompt) values ('nightly', 'look') returning id::text`)
	put(t, pool, `
		insert into agent_automation_runs (automation_id, scheduled_for, status, error_message)
		values ($1, clock_timestamp(), 'dead', $2) returning id::text`, automation, text)
	put(t, pool, `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, status, body, body_sha256, error_message)
		values ('github', 'd1', 'wh_1', 'wh_1', 'dead', '', '', $1) returning id::text`, text)
	target := put(t, pool, `
		insert into agent_webhook_targets (name, url, secrets, events) values ('ops', 'https://example.com', '{x}', '{*}') returning id::text`)
	put(t, pool, `
		insert into agent_webhook_outbox (target_id, event, payload, trace_id, status, last_error)
		values ($1, 'execution.failed', '{}', 'hb_00000000000000000000000001', 'dead', $2) returning id::text`, target, text)
	put(t, pool, `insert into agent_threads (id, channel) values ('t1', 'webhook') returning id`)
	put(t, pool, `
		insert into agent_messages (thread_id, seq, turn, role, content, status, error_message)
		values ('t1', 1, 1, 'assistant', 'hello', 'failed', $1) returning id::text`, text)
}

func TestWhatNeedsAPersonIsCountedAndLinked(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	waitsForPeople(t, pool, "some text")
	texts := []string{"by self-heal: some text", "/approvals?status=pending", "/deliveries?status=dead", "/objectives?status=proposed", "/threads/t1", "/skills/fetch"}
	for _, kind := range kindsOfNeed() {
		texts = append(texts, `id="need-`+kind.Kind+`"`, `">1<span class="aside-text"> `+kind.Title)
	}
	body := shows(t, server.URL+"/", texts...)
	if strings.Contains(body, "Nothing needs you") {
		t.Error("the page says that nothing does")
	}
	_, part, _ := strings.Cut(body, `<section id="needs"`)
	part, _, _ = strings.Cut(part, "</section>")
	links := regexp.MustCompile(`href="([^"]+)"`).FindAllStringSubmatch(part, -1)
	if len(links) != 22 {
		t.Errorf("%d links, want one to the list and one to the thing of each of 11 kinds", len(links))
	}
	for _, link := range links {
		if strings.HasPrefix(link[1], "/skills") {
			continue // of a page that has its own tests
		}
		if status, _ := see(t, server.URL+strings.ReplaceAll(link[1], "&amp;", "&")); status != 200 {
			t.Errorf("%s: status %d", link[1], status)
		}
	}
}

func TestWhatNeedsAPersonIsCountedUpToABound(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	_, err := pool.Exec(t.Context(), `
		insert into agent_approvals (trace_id, skill_name, skill_revision, arguments, arguments_hash, expires_at)
		select 'hb_1', 'drop', 1, '{}', n::text, clock_timestamp() + interval '1 day' from generate_series(1, 1200) n`)
	if err != nil {
		t.Fatal(err)
	}
	shows(t, server.URL+"/", `">1,000+<span class="aside-text"> Approvals to decide`)
}

func TestAHostileOverviewIsText(t *testing.T) {
	t.Parallel()
	pool, server := open(t)
	text := hostile + strings.Repeat("x", 1000)
	waitsForPeople(t, pool, text)
	put(t, pool, `
		insert into agent_activity (trace_id, skill_name, status, purpose, surface, agent, lane, error_class, error_message)
		values ('hb_1"><b>', $1, 'error', $2, $2, $2, $2, $2, $2) returning id::text`, text, text+strings.Repeat("y", 1_000_000))
	put(t, pool, `insert into agent_objectives (name, goal) values ($1 || '2', $1) returning id::text`, text)
	put(t, pool, `insert into agent_memory (category, key, value) values (left($1, 200), left($1, 200), to_jsonb($1::text)) returning id::text`, text)
	put(t, pool, `insert into agent_locks (lane, locked_by, fencing_token, expires_at) values ($1, $1, 1, clock_timestamp() + interval '1 hour') returning lane`, text)
	harmless(t, server.URL+"/")
	harmless(t, server.URL+"/activity")
	if body := shows(t, server.URL+"/"); strings.Contains(body, `"><b>`) {
		t.Error("a trace id leaves its attribute")
	}
}

func TestFiltersOfTheOverviewAreChecked(t *testing.T) {
	t.Parallel()
	_, server := open(t)
	for query, why := range map[string]string{
		"surface=none": "surface", "status=fine": "status", "trace=%3Cb%3E": "trace", "skill=" + strings.Repeat("x", 301): "skill",
		"since=yesterday": "since", "until=1": "until", "row=1": "row",
	} {
		turnsAway(t, server.URL+"/activity?"+query, 400, why)
	}
	turnsAway(t, server.URL+"/?surface=none", 400, "surface")
	turnsAway(t, server.URL+"/activity?cursor=x", 400, "page")
}
