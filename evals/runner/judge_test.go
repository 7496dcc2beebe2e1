package runner_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/runner"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// judgeFixture is a runner whose model plays the agent and the judge. The judge passes answers with the word kind. Its
// verdict about an answer with the word trap is wrong.
type judgeFixture struct {
	*testRunner
	mu            sync.Mutex
	judgeRequests int    // requests of the judge
	onTwentieth   func() // called at the 20th request of the judge; may be nil
}

func newJudgeFixture(t *testing.T, answers func(prompt string) string) *judgeFixture {
	t.Helper()
	b := &judgeFixture{testRunner: newTestRunner(t)}
	b.model.Handle(func(_ int, req openai.ChatCompletionRequest) modeltest.Reply {
		last := req.Messages[len(req.Messages)-1].Content
		_, quoted, isJudge := strings.Cut(last, "# Answer\n\n")
		if !isJudge {
			return modeltest.Text(answers(last)).WithUsage(100, 10, 0)
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.judgeRequests++; b.judgeRequests == 20 && b.onTwentieth != nil {
			b.onTwentieth()
		}
		pass := strings.Contains(quoted, "kind") != strings.Contains(quoted, "trap")
		return modeltest.Text(fmt.Sprintf(`{"reason":"It is so.","pass":%t}`, pass)).WithUsage(200, 10, 0)
	})
	return b
}

func (b *judgeFixture) judgeCalls() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.judgeRequests
}

// newLabels returns n labels, half of them good. The judge misjudges the first wrong answers.
func newLabels(n, wrong int) (list []evals.JudgeLabel) {
	for i := range n {
		l := evals.JudgeLabel{Answer: fmt.Sprintf("answer %d", i), Pass: i%2 == 0}
		if l.Pass {
			l.Answer += " kind"
		}
		if i < wrong {
			l.Answer += " trap"
		}
		list = append(list, l)
	}
	return list
}

func judgedSuite(labels []evals.JudgeLabel, others ...evals.Expectation) evals.Definition {
	judge := evals.JudgeRule{Rubric: "It is kind.", Model: "gpt-4.1", Labelled: labels}
	d := evals.Definition{Name: "kindness", Agent: "sales", Trials: 1, Budget: evals.Budget{CostUSD: 5}}
	for _, prompt := range []string{"a kind one", "a harsh one"} {
		d.Cases = append(d.Cases, evals.Case{
			Name: prompt, Messages: userMessage(prompt), Expect: append([]evals.Expectation{{Judge: &judge}}, others...),
		})
	}
	return d
}

func echo(prompt string) string {
	return "This is " + prompt[strings.LastIndex(prompt, "\n")+1:] + "."
}

var anyAnswer = evals.Expectation{Answer: &evals.Answer{Contains: "this"}}

// A calibrated judge decides trials that meet all other expectations. Its cost is separate from the trial's. It judges
// a labelled answer only once.
func TestCalibratedJudgeDecides(t *testing.T) {
	t.Parallel()
	b := newJudgeFixture(t, echo)
	report := b.run(t, judgedSuite(newLabels(30, 0), anyAnswer), runner.Options{})
	kind, harsh := report.TrialRows[0], report.TrialRows[1]
	assert.Truef(t, kind.Verdict == evals.Pass && harsh.Verdict == evals.Fail &&
		strings.Join(harsh.Reasons, "") == "expect[0]: the judge gpt-4.1: It is so.", "the trials are %+v and %+v", kind,
		harsh)
	j := kind.Judgements[0]
	assert.Truef(t, j.Calibrated && j.Votes == 2 && j.Passes == 2 && !j.Same && kind.JudgeTokens == 420 &&
		kind.JudgeUSD > 0 && kind.CostUSD > 0 && kind.Tokens == 110, "the judgement is %+v of %+v", j, kind)
	n := b.judgeCalls()
	assert.Equal(t, 30*2+2*2, n, "2 equal votes for each of 30 labels and 2 trials")
	pgtest.Equal(t, b.pool, 64, `select count(*)::int from agent_activity where purpose = 'eval_judge' and kind = 'model'`)
	b.run(t, judgedSuite(newLabels(30, 0), anyAnswer), runner.Options{})
	assert.Equal(t, 30*2+4*2, b.judgeCalls(), "a second run asks the judge", "times in all")
	// The calibration and its cost are stored with the run. The second run paid for no calibration.
	if j := report.Judges; len(j) != 1 || !j[0].Calibrated || report.CalibrationTokens != 30*2*210 ||
		report.CalibrationUSD <= 0 {
		t.Errorf("the run reports the judges %+v, for %d tokens", j, report.CalibrationTokens)
	}
	again := b.run(t, judgedSuite(newLabels(30, 0), anyAnswer), runner.Options{})
	pgtest.Exec(t, b.pool, `update agent_eval_judgements set pass = not pass`)
	if again = b.report(t, again.Run); !again.Judges[0].Calibrated || again.CalibrationTokens != 0 {
		t.Errorf("later verdicts change the run: %+v, %d tokens", again.Judges, again.CalibrationTokens)
	}
	pgtest.Exec(t, b.pool, `update agent_eval_judgements set pass = not pass`)
	subject := b.subject(t)
	found, err := evals.CalibrateJudges(t.Context(), b.pool, subject)
	assert.Truef(t, err == nil && len(found) == 1 && found[0].Calibrated && found[0].Agreed == 30,
		"the calibration is %+v, %v", found, err)
}

func (b *judgeFixture) subject(t *testing.T) evals.Subject {
	t.Helper()
	runs, err := evals.Runs(t.Context(), b.pool, "", 1)
	require.NoError(t, err)
	s, err := evals.ReadSubject(t.Context(), b.pool, runs[0])
	require.NoError(t, err)
	return s
}

// The report shows the verdict of an uncalibrated judge, but the verdict decides nothing.
func TestUncalibratedJudgeDecidesNothing(t *testing.T) {
	t.Parallel()
	for why, labels := range map[string][]evals.JudgeLabel{
		"29 labels, less than 30":          newLabels(29, 0),
		"its agreement may be as low as 0": newLabels(30, 6),
		"0 labels, less than 30":           nil,
	} {
		t.Run(why, func(t *testing.T) {
			t.Parallel()
			b := newJudgeFixture(t, echo)
			report := b.run(t, judgedSuite(labels, anyAnswer), runner.Options{})
			for i, trial := range report.TrialRows {
				if j := trial.Judgements[0]; trial.Verdict != evals.Pass || j.Calibrated || !j.Decided || j.Pass != (i == 0) {
					t.Errorf("%s is %s with %+v", trial.Case, trial.Verdict, j)
				}
			}
			found, err := evals.CalibrateJudges(t.Context(), b.pool, b.subject(t))
			assert.Truef(t, err == nil && strings.HasPrefix(found[0].Why, why),
				"it is not calibrated because %+v, %v", found, err)
			alone := b.run(t, judgedSuite(labels), runner.Options{})
			assert.Equal(t, evals.Undecided, alone.Status, "a case that only the judge could decide")
		})
	}
}

// A trial that fails other expectations does not reach the judge. Labels of trials count like those in the file.
func TestJudgeRunsAfterOtherExpectations(t *testing.T) {
	t.Parallel()
	b := newJudgeFixture(t, echo)
	d := judgedSuite(newLabels(29, 0), evals.Expectation{Answer: &evals.Answer{Lacks: "this"}})
	report := b.run(t, d, runner.Options{})
	if n := b.judgeCalls(); n > 0 || report.Status != evals.Failed || len(report.TrialRows[0].Judgements) > 0 {
		t.Errorf("the judge was asked %d times about trials that failed", n)
	}
	_, _, err := evals.PutLabel(t.Context(), b.pool, evals.NewLabel{Run: report.ID, Case: "a kind one", Word: evals.Good})
	require.NoError(t, err)
	report = b.run(t, judgedSuite(newLabels(29, 0), anyAnswer), runner.Options{})
	assert.Truef(t, report.TrialRows[0].Judgements[0].Calibrated,
		"29 labels of the file and one of a trial do not calibrate: %+v", report.TrialRows[0])
}

// A resumed run does not repeat answered votes. A run without budget calls no judge.
func TestResumedRunRepeatsNoVote(t *testing.T) {
	t.Parallel()
	b := newJudgeFixture(t, echo)
	ctx, interrupt := context.WithCancel(t.Context())
	run := b.start(t, judgedSuite(newLabels(30, 0), anyAnswer), runner.Options{})
	b.onTwentieth = interrupt
	require.Error(t, b.runner.Work(ctx, run, 3, func(evals.Trial) {}), "the run was not interrupted")
	require.NoError(t, b.runner.Work(t.Context(), run, 3, func(evals.Trial) {}))
	if report := b.report(t, run); report.Cases[0].Passed != 1 || report.Cases[1].Passed != 0 {
		t.Errorf("the run is %+v", report)
	}
	pgtest.Equal(t, b.pool, 0, `
		select count(*)::int from (select execution_id, step from agent_activity where kind = 'model' and status = 'success'
		   group by 1, 2 having count(*) > 1) twice`)

	unfunded := judgedSuite(newLabels(30, 0), anyAnswer)
	unfunded.Name, unfunded.Budget.CostUSD = "poor", 0.0001
	for _, c := range unfunded.Cases {
		c.Expect[0].Judge.Rubric = "It is gentle." // without a verdict
	}
	before := b.judgeCalls()
	report := b.run(t, unfunded, runner.Options{})
	if report.Status != evals.Undecided || b.judgeCalls() > before {
		t.Errorf("without budget the run is %s, and the judge was called %d times", report.Status, b.judgeCalls()-before)
	}
}

func TestReadLabels(t *testing.T) {
	t.Parallel()
	got, err := evals.ReadLabels([]byte("{\"answer\":\"a\",\"pass\":true}\n\n{\"answer\":\"b\",\"rubric\":\"r\",\"pass\":false}"))
	text, _ := json.Marshal(got)
	assert.Truef(t, err == nil && string(text) == `[{"answer":"a","pass":true},{"answer":"b","rubric":"r","pass":false}]`,
		"the labels are %s, %v", text, err)
	for _, wrong := range []string{`{"answer":"a"}`, `{"pass":true}`, `{"answer":"a","pass":1}`, `{"answer":"a","good":true}`, "x"} {
		got, err := evals.ReadLabels([]byte(wrong))
		assert.Truef(t, err != nil && strings.HasPrefix(err.Error(), "label 1: "), "%s is read as %v, %v", wrong, got, err)
	}
}
