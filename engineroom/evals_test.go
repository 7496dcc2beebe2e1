package engineroom

import (
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
	"github.com/lanekeeper/lanekeeper/principals"
)

// seedSuite inserts a suite "returns" with two finished runs of six cases. It returns the runs, the older one first.
// The newer one passes everything except one trial of "late", whose calls differ. The messages of users and agent are
// text.
func seedSuite(t *testing.T, pool *pgxpool.Pool, text string) (older, newer string) {
	t.Helper()
	d := evals.Definition{Name: "returns", Description: text, Trials: 2}
	for _, name := range []string{"late", "b", "c", "d", "e", "f"} {
		d.Cases = append(d.Cases, evals.Case{
			Name: name, Messages: []evals.Message{{User: text}}, Expect: []evals.Expectation{{NotCalled: []string{"refund"}}},
		})
	}
	_, err := evals.Put(t.Context(), pool, d)
	require.NoError(t, err)
	run := func(status, passes string) string {
		return insert(t, pool, `
			with run as (insert into agent_eval_runs (suite, version, agent, agent_version, model, trials, status, finished_at)
			  values ('returns', 1, 'sales', 3, 'model-one', 2, $1, clock_timestamp()) returning id),
			trials as (insert into agent_eval_trials (run_id, case_name, trial, position, verdict, answer, trace_id, reasons, calls,
			    iterations, cost_usd, tokens, duration_ms)
			  select run.id, c.name, t, c.n, v.verdict, case v.verdict when 'pass' then $3::text else $3::text || ' Paid.' end,
			         'ev_01J8052XG1XHJAZ95GX5TCNBAZ', case v.verdict when 'pass' then '{}'::text[] else array[$3::text] end,
			         jsonb_build_array(jsonb_build_object('skill', 'check_order', 'args', jsonb_build_object('order', 7)),
			           jsonb_build_object('skill', 'note', 'args',
			             jsonb_build_object('text', case v.verdict when 'pass' then 'due' else 'paid' end))),
			         2, 0.005, 120, 1500
			    from run, unnest('{late,b,c,d,e,f}'::text[]) with ordinality c (name, n), generate_series(1, 2) t
			   cross join lateral (select case when $2 = 'none' or $2 = 'some' and c.name = 'late' and t = 2 then 'fail' else 'pass' end
			     as verdict) v)
			select id::text from run`, status, passes, text)
	}
	return run("failed", "none"), run("failed", "some")
}

func TestEvalSuitesShowRunsAndCases(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/evals", "No suite yet", "kind: eval")
	wantTexts(t, server.URL+"/find?q=evals", `href="/evals"`)
	older, newer := seedSuite(t, pool, "Money <b>back</b>!")
	wantTexts(t, server.URL+"/evals", `href="/evals/returns"`, "Money &lt;b&gt;back", "11/12", "0.65–0.99", "0/12",
		"better",
		`href="/evals/runs/`+newer, `action="/act/v1/evals/runs"`, "$0.06")
	wantTexts(t, server.URL+"/evals/returns", "Cases in the newest runs", "1/2", "pass^2 0.00", "pass^2 1.00",
		`href="/evals/runs/`+newer+`/cases/late"`, "No label yet")
	body := wantTexts(t, server.URL+"/evals/runs/"+newer+"?against="+older, "better", "&#43;0.92", "in 6 cases",
		`/cases/late?against=`+older, "Compared run", "does not count for the limits of the day", "Money &lt;b&gt;back")
	assert.Equal(t, 1, strings.Count(body, "selected"))
	wantTexts(t, server.URL+"/find?q="+newer, `href="/evals/runs/`+newer)
	wantTexts(t, server.URL+"/find?q=return", `href="/evals/returns"`)
	for _, path := range []string{
		"/evals/nope", "/evals/runs/nope", "/evals/runs/" + newer + "/cases/nope",
		"/evals/runs/" + newer + "/cases/late?trial=9",
	} {
		status, body := testkit.Get(t, server.URL+path)
		assert.Truef(t, status == http.StatusNotFound, "%s: %d %s", path, status, body)
	}
	pgtest.Exec(t, pool, `
		update agent_eval_runs set kind = 'counterfactual', control_id = case id when $1::uuid then $2::uuid end`, newer, older)
	wantTexts(t, server.URL+"/evals", "Recorded turns, played again", `href="/evals/runs/`+newer)
	wantTexts(t, server.URL+"/evals/runs/"+newer, "Counterfactual of sales", "in 6 cases", "The control follows 0 of 6",
		"does not follow its own recorded turns")
	pgtest.Exec(t, pool, `
		update agent_eval_runs set status = 'running', finished_at = null, created_at = now() - interval '1 hour' where id = $1`,
		newer)
	wantTexts(t, server.URL+"/evals/runs/"+newer, "interrupted", "agent eval counterfactual --resume "+newer)
}

// A shadow without turns has no result. One as good as its control shows the comparison. One "not worse" than a control
// that repeats no recorded call is undecided.
func TestRecordedRunShowsComparison(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	older, newer := seedSuite(t, pool, "Money back!")
	state := func() string {
		t.Helper()
		_, list, _ := strings.Cut(wantTexts(t, server.URL+"/evals"), `id="recorded"`)
		_, page, _ := strings.Cut(wantTexts(t, server.URL+"/evals/runs/"+newer), `id="facts-title">`)
		found := regexp.MustCompile(`status-([a-z-]+)`)
		a, b := found.FindStringSubmatch(list), found.FindStringSubmatch(page)
		require.Truef(t, len(a) > 0 && len(b) > 0 && a[1] == b[1], "the list shows %v, the page %v", a, b)
		return a[1]
	}
	pgtest.Exec(t, pool, `
		update agent_eval_runs set kind = 'shadow', status = 'passed', control_id = case id when $1::uuid then $2::uuid end`,
		newer, older)
	assert.Equal(t, "better", state())
	pgtest.Exec(t, pool, `update agent_evals set definition = definition || '{"gate": {"margin": 0.9}}'`)
	pgtest.Exec(t, pool, `update agent_eval_trials set verdict = 'pass'`)
	assert.Equal(t, "not-worse", state())
	pgtest.Exec(t, pool, `update agent_eval_trials set verdict = 'fail' where case_name <> 'b'`)
	assert.Equal(t, "undecided", state())
	pgtest.Exec(t, pool, `delete from agent_eval_trials`)
	assert.Equal(t, "no-turns", state())
	wantTexts(t, server.URL+"/evals/runs/"+newer, "No turn has been played", "No trial yet")
	pgtest.Exec(t, pool, `update agent_eval_runs set kind = 'suite', control_id = null`)
	wantTexts(t, server.URL+"/evals/runs/"+older, "no trials", "The run has no cases")
}

// The page of a trial shows each judge's verdict, whether it counts, and how often the judge agrees with people.
func TestTrialShowsJudges(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	_, newer := seedSuite(t, pool, "Money back!")
	at := server.URL + "/evals/runs/" + newer + "/cases/b?trial=1"
	assert.True(t, !strings.Contains(wantTexts(t, at), "Judges of trial"),
		"the page shows judges of a trial without judges")
	pgtest.Exec(t, pool, `
		update agent_evals set definition = jsonb_set(definition, '{cases,1,expect}',
		  '[{"judge": {"rubric": "Be <i>kind</i>.", "model": "judge-one"}}]')`)
	pgtest.Exec(t, pool, `
		update agent_eval_trials set judgements = jsonb_build_array(
		    jsonb_build_object('expect', 0, 'model', 'judge-one', 'votes', 3, 'passes', 1, 'why', 'It is <b>gruff</b>.',
		      'decided', true, 'pass', false, 'calibrated', false, 'same_model', true),
		    jsonb_build_object('expect', 7, 'model', 'judge-two', 'votes', 2, 'passes', 1, 'why', 'no majority', 'calibrated', true))
		 where run_id = $1 and case_name = 'b' and trial = 1`, newer)
	wantTexts(t, at, "Judges of trial 1", "judge-one", "same model as the agent", "1 of 3 votes pass",
		"It is &lt;b&gt;gruff",
		"Rubric: Be &lt;i&gt;kind", "does not decide: not calibrated", "It has judged no labelled answer",
		"0 labels, less than 30",
		"judge-two", "1 of 2 votes pass", `status-undecided`, ">decides<")
	rule := evals.JudgeRule{Rubric: "Be <i>kind</i>."}
	for trial, pass := range []bool{true, false} {
		text := fmt.Sprintf("answer %d", trial)
		pgtest.Exec(t, pool, `update agent_eval_trials set answer = $2 where run_id = $1 and case_name = 'b' and trial = $3`,
			newer, text, trial+1)
		_, _, err := evals.PutLabel(t.Context(), pool, evals.NewLabel{Run: newer, Case: "b", Trial: trial + 1, Word: "good"})
		require.NoError(t, err)
		judge, about := evals.JudgeKey("judge-one", rule, text)
		require.NoError(t, evals.PutJudgement(t.Context(), pool, "01a21abd-4de8-7876-b240-505ac1bc02d6", judge, about,
			evals.Judgement{Decided: true, Pass: pass}))
	}
	wantTexts(t, at, "Agrees with people on 1 of 2 labelled answers (0.09–0.91)", "2 labels, less than 30")
}

// The page shows two trials side by side with their first difference. By default it pairs a failed one with a passed
// one.
func TestTrialsAreCompared(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	older, newer := seedSuite(t, pool, "Money back!")
	at := server.URL + "/evals/runs/" + newer + "/cases/"
	differs := func(path string) string {
		t.Helper()
		_, rest, _ := strings.Cut(wantTexts(t, path), `id="difference"`)
		row, _, _ := strings.Cut(rest, "</tbody>")
		return row
	}
	assert.Contains(t, differs(at+"late"), "Call 2", "first difference: the arguments",
		`<del>−   &#34;text&#34;: &#34;paid&#34;`,
		`<ins>&#43;   &#34;text&#34;: &#34;due&#34;`)
	assert.Equal(t, "", differs(at+"late?trial=2&against="+older+"&other=1"))
	wantTexts(t, at+"late?trial=2&against="+older+"&other=1", "Their calls and answers are the same")
	assert.Contains(t, differs(at+"b?against="+older), "first difference: the arguments")
	pgtest.Exec(t, pool, `update agent_eval_trials set calls = '[]' where run_id = $1 and trial = 1`, newer)
	assert.Contains(t, differs(at+"late"), "Call 1", "first difference: only one calls")
	pgtest.Exec(t, pool, `update agent_eval_trials set calls = '[]' where run_id = $1`, newer)
	assert.Contains(t, differs(at+"late"), "Answer", "first difference: the answer", "<del>− Money back! Paid.</del>")
	wantTexts(t, at+"b", "Trial 1", `rel="next" href="/evals/runs/`+newer+`/cases/b?trial=2"`)
	wantTexts(t, at+"late?trial=2", `rel="next" href="/evals/runs/`+newer+`/cases/b?trial=1"`)
}

// Rows that were imported keep the ids of their agent.
func TestImportedTracePage(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const id = "hb_m3k9f2_a7x2p1"
	pgtest.Exec(t, pool, `
		insert into agent_activity (trace_id, skill_name, status) values ($1, 'advance_plan', 'success')`, id)
	wantTexts(t, server.URL+"/traces/"+id, id, "advance_plan")
	wantTexts(t, server.URL+"/activity?trace="+id, "advance_plan")
	wantTexts(t, server.URL+"/find?q="+id, id)
}

// A trace with a message becomes a case. Other traces say why they cannot.
func TestCaseFromTrace(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const id = "ch_01J8052XG1XHJAZ95GX5TCNBAZ"
	rows.Quiet(t, pool, `
		insert into agent_activity (trace_id, surface, skill_name, kind, status, token_usage, input) values
		($1, 'chat', 'model_call', 'model', 'success', '{"total_tokens": 9}', '{"messages": [{"role": "user", "content": "<b>Order</b> 7?"}]}')`, id)
	wantTexts(t, server.URL+"/traces/"+id, `href="/evals/from/`+id+`"`)
	wantTexts(t, server.URL+"/evals/from/"+id, "name: from-traces", "&lt;b&gt;Order&lt;/b&gt; 7?", `class="copy"`,
		"agent eval add "+id)
	seedSuite(t, pool, "Money back!")
	wantTexts(t, server.URL+"/evals/from/"+id+"?suite=returns", "<code>name: returns</code>", "/case.yaml?suite=returns")
	status, text := testkit.Get(t, server.URL+"/evals/from/"+id+"/case.yaml?suite=returns")
	assert.Truef(t, status == http.StatusOK && strings.HasPrefix(text, "  - name: from "+id+"\n"), "%d %s", status, text)
	rows.Quiet(t, pool, `update agent_activity set input = '{}'`)
	wantTexts(t, server.URL+"/evals/from/"+id, "No case can be made")
}

// The page makes the same case as agent eval add, also for a turn that delegated a task.
func TestCaseFromTraceLeavesOutDelegatedCalls(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const id = "ch_01J8052XG1XHJAZ95GX5TCNBAZ"
	rows.Quiet(t, pool, `
		insert into agent_activity (trace_id, surface, execution_id, kind, skill_name, status, input, output) values
		($1, 'chat', $2, 'model', 'model_call', 'success', '{"messages": [{"role": "user", "content": "Where is 7?"}]}', null),
		($1, 'chat', $3, 'model', 'model_call', 'success', '{"messages": [{"role": "user", "content": "Refund it."}]}', null),
		($1, 'chat', $3, 'call', 'refund', 'success', '{}', '{}'),
		($1, 'chat', $2, 'phase', 'delegate', 'success', '{"task": "refund it"}', '{"answer": "Done."}'),
		($1, 'chat', $2, 'phase', 'reflect', 'success', '{}', '{}')`,
		id, "00000000-0000-0000-0000-000000000001", "00000000-0000-0000-0000-000000000002")
	trace, err := activity.TraceOf(t.Context(), pool, id)
	require.NoError(t, err)
	made, err := evals.FromTrace(trace, "")
	require.NoError(t, err)
	want, err := made.YAML()
	require.NoError(t, err)
	_, text := testkit.Get(t, server.URL+"/evals/from/"+id+"/case.yaml")
	assert.NoDiff(t, "kind: eval\nname: from-traces\ncases:\n"+want, text)
	assert.Contains(t, text, "delegate")
}

// A key and Enter label, one key undoes, and two lead to the trials before and after. No single key labels, because g
// also leads to other pages.
func TestTrialIsLabelledByKeys(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/evals/labels", func(w http.ResponseWriter, r *http.Request) {
		var l evals.NewLabel
		err := json.NewDecoder(r.Body).Decode(&l)
		if err == nil {
			_, _, err = evals.PutLabel(r.Context(), pool, l)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	room := newRoom(t, Options{Pool: pool, API: func() http.Handler { return mux }})
	server := serveRoom(t, room)
	_, newer := seedSuite(t, pool, "Money back!")
	p := browser.Open(t, browser.Look{})
	p.Go(server.URL + "/evals/runs/" + newer + "/cases/late?trial=1")
	p.Shows("No label yet")
	p.PressUntil("b", `document.activeElement.value === "bad"`)
	pgtest.Equal(t, pool, int64(0), `select count(*) from agent_eval_labels`)
	p.Press("\r")
	p.Until("the trial is labelled", `document.querySelector("#label .status-bad") !== null`)
	p.PressUntil("u", `document.body.innerText.includes("No label yet")`)
	p.Type("#label-form input[name=note]", "good, but gruff") // in a field, letters are no shortcuts
	p.Press("\t")
	p.PressUntil("g", `document.activeElement.value === "good"`)
	p.Press("\r")
	p.Until("the trial has the note", `document.querySelector("#label").innerText.includes("good, but gruff")`)
	pgtest.Equal(t, pool, "true good, but gruff", `select good || ' ' || note from agent_eval_labels`)
	p.PressUntil("j", `location.search === "?trial=2" && document.getElementById("label-keys")?.hidden === false`)
	p.PressUntil("k", `location.search === "?trial=1"`)
	wantNoBrowserErrors(t, p)
	p.PressUntil("go", `location.pathname === "/"`)
}

// The buttons depend on the role: a viewer makes no case of a trace, an approver reads a trial and labels nothing, and
// only an operator starts a run. The server rejects the rest; see TestEveryPageForEveryRole.
func TestEvalButtonsDependOnRole(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	role := principals.Viewer
	server := serveAs(t, pool, func(*http.Request) (string, principals.Role) { return "ana", role })
	_, newer := seedSuite(t, pool, "Money back!")
	const trace = "ch_01J8052XG1XHJAZ95GX5TCNBAZ"
	rows.Quiet(t, pool, `insert into agent_activity (trace_id, surface, skill_name, kind, status, token_usage) values
		($1, 'chat', 'model_call', 'model', 'success', '{"total_tokens": 9}')`, trace)
	p := browser.Open(t, browser.Look{})
	for _, c := range []struct {
		role                 principals.Role
		adds, labels, starts bool
	}{
		{principals.Viewer, false, false, false},
		{principals.Approver, true, false, false},
		{principals.Operator, true, true, true},
	} {
		role = c.role
		for at, button := range map[string]struct {
			selector string
			visible  bool
		}{
			"/traces/" + trace: {`#head .actions a:nth-last-child(2)`, c.adds},
			"/evals/runs/" + newer + "/cases/late?trial=1": {"#label-form button", c.labels},
			"/evals":         {`#list details.action`, c.starts},
			"/evals/returns": {`#facts form button`, c.starts},
		} {
			p.Go(server + at)
			var visible bool
			p.Eval(`document.querySelector('`+button.selector+`').getClientRects().length > 0`, &visible)
			assert.Truef(t, visible == button.visible, "the role %s sees %s on %s: %t", c.role, button.selector, at, visible)
		}
	}
	wantNoBrowserErrors(t, p)
}

// Labels, notes and reasons of verdicts may quote answers. Only callers with threads:read get them.
func TestLabelTextsNeedThreadsRead(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	room := newRoom(t, Options{Pool: pool})
	_, newer := seedSuite(t, pool, "Money back!")
	_, _, err := evals.PutLabel(t.Context(), pool, evals.NewLabel{
		Run: newer, Case: "late", Trial: 2, Word: evals.Good, Note: "too kind",
	})
	require.NoError(t, err)
	for role, quotes := range map[principals.Role]bool{principals.Viewer: false, principals.Approver: true} {
		for _, path := range []string{"/evals/returns", "/evals/returns?part=labels"} {
			body := getAs(t, room, path, role, principals.All)
			assert.Contains(t, body, "late, trial 2")
			assert.Equal(t, quotes, strings.Contains(body, "Paid."), path, role)
			assert.Equal(t, quotes, strings.Contains(body, "too kind"), path, role)
		}
		for _, path := range []string{"", "?part=cases", "?part=trials"} {
			body := getAs(t, room, "/evals/runs/"+newer+path, role, principals.All)
			assert.Contains(t, body, "late")
			assert.Equal(t, quotes, strings.Contains(body, "Money back!"), path, role)
		}
	}
}

func TestLongTraceMakesNoCase(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	const trace = "op_01J8052XG1XHJAZ95GX5TCNBAZ"
	rows.Quiet(t, pool, `
		insert into agent_activity (trace_id, kind, skill_name, status)
		select $1, 'call', 'fetch', 'success' from generate_series(1, $2::int)`, trace, maxCaseCalls+1)
	wantTexts(t, server.URL+"/evals/from/"+trace, "the trace has more than 500 calls")
}

// The cost of trials is spend of the surface eval, without a skill. No daily budget includes it.
func TestEvalSpendHasItsOwnSurface(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	insertModelCall(t, pool, "advance_plan", "model-one", "0.75", "0")
	rows.Quiet(t, pool, `
		insert into agent_activity (trace_id, kind, skill_name, purpose, model, surface, cost_usd, token_usage, led_to)
		values ('ev_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'model', 'model_call', 'eval', 'model-one', 'eval', 0.25,
		  '{"prompt_tokens": 400, "completion_tokens": 100, "total_tokens": 500}', '{"check_order": 1}'),
		  ('ev_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'call', 'check_order', '', '', 'eval', 0, '{}', '{}')`)
	for by, text := range map[string]string{"surface": "surface=eval", "purpose": "purpose=eval"} {
		wantTexts(t, server.URL+"/spend?days=1&by="+by, "$1.00 and 1,500 tokens", text, "25 %")
	}
	wantTexts(t, server.URL+"/", "Evals are included", "$0.25", "They do not count for the limits of the day")
	wantTexts(t, server.URL+"/spend?days=1&surface=eval&by=model", "$0.25 and 500 tokens",
		`<option value="eval" selected>`)
	body := wantTexts(t, server.URL+"/spend?days=1&surface=eval")
	assert.Truef(t, !strings.Contains(body, "skill=check_order"), "trials are charged to a skill: %s", body)
	wantTexts(t, server.URL+"/activity?surface=eval", "check_order")
	wantTexts(t, server.URL+"/executions?surface=eval", "eval")
}
