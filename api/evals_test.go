package api_test

import (
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/principals"
)

// evalTrial inserts a suite "returns" and a run with one decided and one open trial. It returns the run's id.
func evalTrial(t *testing.T, pool *pgxpool.Pool) string {
	t.Helper()
	_, err := evals.Put(t.Context(), pool, evals.Definition{Name: "returns", Trials: 2, Cases: []evals.Case{{
		Name: "late", Messages: []evals.Message{{User: "Money back!"}},
		Expect: []evals.Expectation{{NotCalled: []string{"refund"}}},
	}}})
	require.NoError(t, err)
	return pgtest.Value[string](t, pool, `
		with run as (insert into agent_eval_runs (suite, version, agent, agent_version, model, trials)
		  values ('returns', 1, 'sales', 1, 'm', 2) returning id),
		trials as (insert into agent_eval_trials (run_id, case_name, trial, position, verdict, answer, trace_id)
		  select id, 'late', t, 1, case t when 1 then 'pass' end, case t when 1 then 'Not due.' else '' end, 'ev_' || t
		    from run, generate_series(1, 2) t)
		select id::text from run`)
}

// The error for an unknown object is a short sentence with its name.
func TestUnknownEvalProblems(t *testing.T) {
	t.Parallel()
	a := start(t)
	run := evalTrial(t, a.pool)
	const none = "01a20055-1dbc-7d0e-8014-41a4f664fe0a"
	for _, r := range [][4]string{
		{"GET", "/v1/evals/runs/" + none, "", "no run " + none},
		{"GET", "/v1/evals/runs/" + run + "?against=" + none, "", "against: no run " + none},
		{
			"POST", "/v1/evals/labels", `{"run":"` + run + `","case":"x","label":"good"}`,
			`no trial 1 of case \"x\" in run ` + run,
		},
	} {
		if w := a.raw(r[0], r[1], r[2], asAdmin()); w.Code != http.StatusNotFound ||
			!strings.Contains(w.Body.String(), `"detail":"`+r[3]+`"`) {
			t.Errorf("%s: %d %s", r[1], w.Code, w.Body)
		}
	}
}

// A label is stored with its answer. Its author can replace or withdraw it. A trial without an answer has no label.
func TestTrialLabelsOverHTTP(t *testing.T) {
	t.Parallel()
	a := start(t)
	run := evalTrial(t, a.pool)
	var label evals.Label
	put := func(trial, word string) {
		t.Helper()
		label = evals.Label{}
		a.post("/v1/evals/labels",
			`{"run":"`+run+`","case":"late","trial":`+trial+`,"label":"`+word+`","note":"kind"}`, &label)
	}
	put("1", "bad")
	put("1", "good")
	assert.Equal(t, evals.Label{
		Run: run, Suite: "returns", Case: "late", Trial: 1, Answer: "Not due.", Digest: label.Digest,
		Word: "good", Good: true,
		Note:      "kind",
		Principal: "root", CreatedAt: label.CreatedAt,
	}, label)
	var labels struct{ Items []evals.Label }
	a.get("/v1/evals/labels?suite=returns&run="+run, &labels)
	assert.Truef(t, len(labels.Items) == 1 && labels.Items[0] == label, "the labels are %+v", labels.Items)
	put("1", "none")
	assert.Truef(t, label.Word == "none" && label.CreatedAt.IsZero(), "the withdrawn label is %+v", label)
	a.get("/v1/evals/labels", &labels)
	assert.Equal(t, 0, len(labels.Items))
	pgtest.Exec(t, a.pool, `update agent_eval_trials set verdict = 'undecided' where run_id = $1 and trial = 2`, run)
	for body, want := range map[string]int{
		`{"run":"` + run + `","case":"late","trial":2,"label":"good"}`:          409,
		`{"run":"` + run + `","case":"late","trial":3,"label":"good"}`:          404,
		`{"run":"` + run + `","case":"late","trial":-5,"label":"good"}`:         400,
		`{"run":"` + run + `","case":"late","trial":3000000000,"label":"good"}`: 400,
		`{"run":"` + run + `","case":"late","label":"fine"}`:                    400,
		`{"run":"x","case":"late","label":"good"}`:                              400,
		`{"run":"` + run + `","case":"late","label":"good","trials":"1"}`:       400,
	} {
		w := a.raw("POST", "/v1/evals/labels", body, asAdmin())
		assert.Truef(t, w.Code == want, "%s: %d %s", body, w.Code, w.Body)
	}
}

func TestEvalRunsOverHTTP(t *testing.T) {
	t.Parallel()
	a := start(t)
	run, other := evalTrial(t, a.pool), evalTrial(t, a.pool)
	var suites struct {
		Items []struct {
			Name string
			Last evals.Run `json:"last_run"`
		}
	}
	a.get("/v1/evals", &suites)
	assert.Equal(t, other, suites.Items[0].Last.ID)
	var runs struct{ Items []evals.Run }
	a.get("/v1/evals/runs?suite=returns&limit=1", &runs)
	assert.Equal(t, other, runs.Items[0].ID)
	var report evals.Report
	a.get("/v1/evals/runs/"+other+"?against="+run, &report)
	assert.Equal(t, 1, report.Cases[0].Passed)
	assert.Equal(t, run, report.Against.ID)
	assert.Equal(t, "", report.TrialRows[0].Answer)
	a.get("/v1/evals/runs/"+other+"?calls=true", &report)
	assert.Equal(t, "Not due.", report.TrialRows[0].Answer)
	a.checkProblem(a.raw("GET", "/v1/evals/runs/x", "", asAdmin()), 400, "")
}

// Answers and reasons of trials need threads:read. The rest of a run does not.
func TestTrialAnswersNeedThreadsRead(t *testing.T) {
	t.Parallel()
	a := start(t)
	run := evalTrial(t, a.pool)
	pgtest.Exec(t, a.pool, `update agent_eval_trials set reasons = '{He said: no.}' where trial = 1`)
	_, viewer := a.key(principals.User, principals.Viewer, 0, "*")
	_, approver := a.key(principals.User, principals.Approver, 0, "*")
	_, labeller := a.key(principals.User, principals.Operator, 0, "runs:write")
	label := `{"run":"` + run + `","case":"late","trial":1,"label":"good"}`
	w := a.raw("POST", "/v1/evals/labels", label, bearer(labeller))
	assert.Truef(t, w.Code == http.StatusOK && !strings.Contains(w.Body.String(), "Not due."),
		"the label: %d %s", w.Code, w.Body)
	for path, code := range map[string]int{
		"/v1/evals/labels": 403, "/v1/evals/runs/" + run + "?calls=true": 403, "/v1/evals/runs/" + run: 200,
	} {
		if w := a.raw("GET", path, "", bearer(viewer)); w.Code != code || strings.Contains(w.Body.String(), "Not due.") {
			t.Errorf("%s as viewer: %d %s", path, w.Code, w.Body)
		}
		w := a.raw("GET", path, "", bearer(viewer))
		if strings.Contains(w.Body.String(), "He said") {
			t.Errorf("%s quotes a reason: %s", path, w.Body)
		}
		assert.Truef(t, !strings.Contains(w.Body.String(), `"judgements":null`), "%s: %s", path, w.Body)
		w = a.raw("GET", path, "", bearer(approver))
		assert.Equal(t, http.StatusOK, w.Code, path)
		assert.Equal(t, code == 403, strings.Contains(w.Body.String(), "Not due."), path)
		assert.Equal(t, strings.Contains(path, "/runs/"), strings.Contains(w.Body.String(), "He said"), path)
	}
}
