package main

import (
	"encoding/xml"
	"fmt"
	"strings"

	"github.com/lanekeeper/lanekeeper/evals"
	"github.com/lanekeeper/lanekeeper/evals/stats"
)

// junit renders the trials of reports: fail as failure, diverged and error as error, undecided as skipped.
func junit(reports []evals.Report) ([]byte, error) {
	var all junitSuites
	for _, r := range reports {
		suite := junitSuite{Name: r.Suite, Tests: len(r.TrialRows)}
		if r.ControlRun != nil {
			all.Suites = append(all.Suites, junitComparison(r))
			continue
		}
		for _, t := range r.TrialRows {
			one := junitCase{
				Class: r.Suite, Name: fmt.Sprintf("%s #%d", t.Case, t.Trial),
				Seconds: fmt.Sprintf("%.3f", float64(t.DurationMS)/1000),
			}
			message := &junitMessage{strings.Join(t.Reasons, "; "), "trace " + t.TraceID}
			switch t.Verdict {
			case evals.Pass:
			case evals.Fail:
				one.Failure = message
				suite.Failures++
			case evals.Diverged, evals.Error:
				one.Error = message
				suite.Errors++
			default:
				one.Skipped = message
				suite.Skipped++
			}
			suite.Cases = append(suite.Cases, one)
		}
		all.Suites = append(all.Suites, suite)
	}
	text, err := xml.MarshalIndent(all, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("render JUnit: %w", err)
	}
	return append([]byte(xml.Header), append(text, '\n')...), nil
}

// junitComparison renders the comparison with a control as one test. A single recorded turn fails nothing.
func junitComparison(r evals.Report) junitSuite {
	suite := junitSuite{Name: r.Kind + " of " + r.Agent, Tests: 1}
	one := junitCase{Class: suite.Name, Name: "not worse than the control"}
	message := &junitMessage{
		fmt.Sprintf("%s: %+.2f (%.2f to %.2f)", r.Comparison.Answer, r.Comparison.Difference, r.Difference.Low,
			r.Difference.High), "run " + r.ID,
	}
	switch {
	case r.FinishedAt == nil, r.Comparison.Answer == stats.Undecided:
		one.Skipped, suite.Skipped = message, 1
	case r.Comparison.Answer == stats.Worse:
		one.Failure, suite.Failures = message, 1
	}
	suite.Cases = []junitCase{one}
	return suite
}

// The elements of JUnit XML that CI servers read.
type (
	junitSuites struct {
		XMLName xml.Name     `xml:"testsuites"`
		Suites  []junitSuite `xml:"testsuite"`
	}
	junitSuite struct {
		Name     string      `xml:"name,attr"`
		Tests    int         `xml:"tests,attr"`
		Failures int         `xml:"failures,attr"`
		Errors   int         `xml:"errors,attr"`
		Skipped  int         `xml:"skipped,attr"`
		Cases    []junitCase `xml:"testcase"`
	}
	junitCase struct {
		Class   string        `xml:"classname,attr"`
		Name    string        `xml:"name,attr"`
		Seconds string        `xml:"time,attr,omitempty"`
		Failure *junitMessage `xml:"failure"`
		Error   *junitMessage `xml:"error"`
		Skipped *junitMessage `xml:"skipped"`
	}
	junitMessage struct {
		Message string `xml:"message,attr"`
		Text    string `xml:",chardata"`
	}
)
