// Package evals declares and stores suites of cases for agents (kind: eval), their runs and trials.
//
// A case has messages, stubs of skills, a memory and scripted approvals, and expectations of the answer and of the
// calls. A trial plays a case once against an agent and a model. Package runner plays trials; this package reads
// their results.
//
// A case can also be a recorded turn ([Recorded]), for counterfactuals. Its trial passes when it makes the recorded
// calls, with the same arguments and in the same order, and answers. The first call that is not recorded ends it as
// diverged, which never passes. The comparison of arguments ignores letter case and spacing of strings, and null
// members. The run is compared with a control run: the current agent with the recorded models.
//
// The tables are agent_evals, agent_eval_runs and agent_eval_trials. agent_evals keeps every applied version. A run
// pins the versions of its suite and agent.
package evals

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/fielderr"
	"github.com/lanekeeper/lanekeeper/internal/schema"
)

// Definition declares a suite in a workspace file.
type Definition struct {
	Name        string `yaml:"name" json:"name"`
	Description string `yaml:"description" json:"description,omitempty"`
	Agent       string `yaml:"agent" json:"agent,omitempty"`     // the default agent if empty
	Surface     string `yaml:"surface" json:"surface,omitempty"` // its rules and skills: chat if empty, or operate
	Trials      int    `yaml:"trials" json:"trials,omitempty"`   // of each case; DefaultTrials when 0
	Budget      Budget `yaml:"budget" json:"budget,omitzero"`
	ApplyGate   *Gate  `yaml:"gate" json:"gate,omitempty"` // nil means that the suite gates no apply
	Cases       []Case `yaml:"cases" json:"cases"`
}

// DefaultTrials is the number of trials of each case.
const DefaultTrials = 5

// Budget bounds a run. A trial beyond it is undecided.
type Budget struct {
	CostUSD float64 `yaml:"cost_usd" json:"cost_usd,omitempty"` // 0: no limit
	Timeout string  `yaml:"timeout" json:"timeout,omitempty"`   // 10m if empty
}

// Gate determines which run lets an apply pass. Margin is the loss of the mean pass rate that still counts as not
// worse. PassRate is the mean pass rate that suffices unless the run is worse. PassRate 0 requires all trials to pass.
type Gate struct {
	Margin   float64 `yaml:"margin" json:"margin,omitempty"`
	PassRate float64 `yaml:"pass_rate" json:"pass_rate,omitempty"`
}

// Case is one task for the agent, with the complete environment of the task.
type Case struct {
	Name      string            `yaml:"name" json:"name"`
	From      string            `yaml:"from" json:"from,omitempty"` // the source trace of the case
	Now       string            `yaml:"now" json:"now,omitempty"`   // RFC 3339; the time of the run when empty
	Messages  []Message         `yaml:"messages" json:"messages"`
	Memory    map[string]any    `yaml:"memory" json:"memory,omitempty"` // by category/key
	Skills    map[string][]Stub `yaml:"skills" json:"skills,omitempty"` // stubs by skill, including delegate
	Approvals map[string]string `yaml:"approvals" json:"approvals,omitempty"`
	Expect    []Expectation     `yaml:"expect" json:"expect"`
}

// UnmarshalJSON decodes a case, with all numbers of arguments, results and memory as they are written.
func (c *Case) UnmarshalJSON(text []byte) error {
	type plain Case
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return d.Decode((*plain)(c))
}

// Message is a message of the user or the assistant. The last one is the user's.
type Message struct {
	User      string `yaml:"user" json:"user,omitempty"`
	Assistant string `yaml:"assistant" json:"assistant,omitempty"`
}

// Stub answers calls whose arguments contain When. Of several matching stubs, the n-th call that matches the same ones
// gets the n-th; the last one repeats.
type Stub struct {
	When    map[string]any `yaml:"when" json:"when,omitempty"`
	Returns any            `yaml:"returns" json:"returns,omitempty"`
	Error   string         `yaml:"error" json:"error,omitempty"`
	Class   string         `yaml:"class" json:"class,omitempty"` // of Error; "error" when empty
}

// Approve and Reject are the scripted decisions. A skill without a decision is rejected.
const (
	Approve = "approve"
	Reject  = "reject"
)

// Expectation has exactly one key.
type Expectation struct {
	Answer        *Answer  `yaml:"answer" json:"answer,omitempty"`
	Called        *Called  `yaml:"called" json:"called,omitempty"`
	NotCalled     []string `yaml:"not_called" json:"not_called,omitempty"`
	InOrder       []string `yaml:"in_order" json:"in_order,omitempty"` // these calls in this order, possibly with others between
	Exact         []string `yaml:"exact" json:"exact,omitempty"`       // these calls and no others
	ApprovalAsked string   `yaml:"approval_asked" json:"approval_asked,omitempty"`
	Delegated     string   `yaml:"delegated" json:"delegated,omitempty"`
	MemoryWritten string   `yaml:"memory_written" json:"memory_written,omitempty"` // category/key
	Within        *Within  `yaml:"within" json:"within,omitempty"`

	Judge *JudgeRule `yaml:"judge" json:"judge,omitempty"` // called if all other expectations are met
}

// Answer describes the text of the answer. Every key must hold. Letter case does not matter to Contains and Lacks.
type Answer struct {
	Contains string         `yaml:"contains" json:"contains,omitempty"`
	Lacks    string         `yaml:"lacks" json:"lacks,omitempty"`
	Regex    string         `yaml:"regex" json:"regex,omitempty"`
	MaxWords int            `yaml:"max_words" json:"max_words,omitempty"`
	Schema   map[string]any `yaml:"schema" json:"schema,omitempty"`
	Expr     string         `yaml:"expr" json:"expr,omitempty"` // over answer, json and calls
}

// Called describes a call. Args must be contained in its arguments. Times is the exact number; at least one when 0.
type Called struct {
	Skill string         `yaml:"skill" json:"skill"`
	Args  map[string]any `yaml:"args" json:"args,omitempty"`
	Times int            `yaml:"times" json:"times,omitempty"`
}

// Within bounds a trial.
type Within struct {
	Iterations int     `yaml:"iterations" json:"iterations,omitempty"`
	CostUSD    float64 `yaml:"cost_usd" json:"cost_usd,omitempty"`
	Latency    string  `yaml:"latency" json:"latency,omitempty"`
}

// Bounds of a definition.
const (
	maxCases  = 500
	maxTrials = 100
	maxText   = 64 << 10
)

var validName = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)

// Validate returns all problems of d, each as "field path: problem", joined by [errors.Join]. It does not check that
// the named agents and skills exist.
func Validate(d Definition) error {
	v := &validator{}
	if !validName.MatchString(d.Name) {
		v.Add("name", "%q must begin with a letter and have 1 to 64 of the characters a-z A-Z 0-9 _ -", d.Name)
	}
	if !slices.Contains([]string{"", "chat", "operate"}, d.Surface) {
		v.Add("surface", "%.60q is not one of chat, operate", d.Surface)
	}
	if d.Trials < 0 || d.Trials > maxTrials {
		v.Add("trials", "must be 1 to %d", maxTrials)
	}
	if d.Budget.CostUSD < 0 {
		v.Add("budget.cost_usd", "must not be negative")
	}
	v.checkDuration("budget.timeout", d.Budget.Timeout)
	if g := d.gate(); g.Margin < 0 || g.Margin >= 1 {
		v.Add("gate.margin", "must be from 0 to less than 1")
	} else if g.PassRate < 0 || g.PassRate > 1 {
		v.Add("gate.pass_rate", "must be from 0 to 1")
	}
	if len(d.Cases) == 0 || len(d.Cases) > maxCases {
		v.Add("cases", "has %d entries; write 1 to %d", len(d.Cases), maxCases)
	}
	names := map[string]bool{}
	for i, c := range d.Cases {
		at := fmt.Sprintf("cases[%d]", i)
		if names[c.Name] {
			v.Add(at+".name", "%.60q is used twice", c.Name)
		}
		names[c.Name] = true
		v.checkCase(at, c)
	}
	return errors.Join(v.List...)
}

type validator struct{ fielderr.List }

func (v *validator) checkDuration(field, text string) {
	if d, err := time.ParseDuration(text); text != "" && (err != nil || d <= 0) {
		v.Add(field, "%.60q must be a duration such as 500ms, 30s or 10m", text)
	}
}

// ValidCaseName reports whether a case can have this name.
func ValidCaseName(name string) bool {
	return name != "" && len(name) <= 100 && !strings.ContainsFunc(name, func(r rune) bool { return r < ' ' })
}

func (v *validator) checkCase(at string, c Case) {
	if !ValidCaseName(c.Name) {
		v.Add(at+".name", "must have 1 to 100 bytes in one line")
	}
	if _, err := time.Parse(time.RFC3339, c.Now); c.Now != "" && err != nil {
		v.Add(at+".now", "%.60q must be a time such as 2026-11-24T10:00:00+01:00", c.Now)
	}
	if len(c.Messages) == 0 || c.Messages[len(c.Messages)-1].User == "" {
		v.Add(at+".messages", "must end with a message of the user")
	}
	for i, m := range c.Messages {
		if (m.User == "") == (m.Assistant == "") || len(m.User)+len(m.Assistant) > maxText {
			v.Add(fmt.Sprintf("%s.messages[%d]", at, i), "must have either user or assistant, of at most %d bytes", maxText)
		}
	}
	for name := range c.Memory {
		if category, key, ok := strings.Cut(name, "/"); !ok || category == "" || key == "" {
			v.Add(at+".memory", "%.60q must be category/key", name)
		}
	}
	for skill, stubs := range c.Skills {
		for i, s := range stubs {
			if (s.Error == "") == (s.Returns == nil) {
				v.Add(fmt.Sprintf("%s.skills.%s[%d]", at, skill, i), "must have either returns or error")
			}
		}
	}
	for skill, decision := range c.Approvals {
		if decision != Approve && decision != Reject {
			v.Add(at+".approvals."+skill, "%.60q is none of %s, %s", decision, Approve, Reject)
		}
	}
	if len(c.Expect) == 0 {
		v.Add(at+".expect", "is empty; a case without expectations always passes")
	}
	for i, e := range c.Expect {
		v.checkExpectation(fmt.Sprintf("%s.expect[%d]", at, i), e)
	}
}

func (v *validator) checkExpectation(at string, e Expectation) {
	keys := 0
	for _, present := range []bool{
		e.Answer != nil, e.Called != nil, e.NotCalled != nil, e.InOrder != nil, e.Exact != nil, e.ApprovalAsked != "",
		e.Delegated != "", e.MemoryWritten != "", e.Within != nil,
		e.Judge != nil,
	} {
		if present {
			keys++
		}
	}
	if keys != 1 {
		v.Add(at, "must have exactly one key; write each expectation as an entry of its own")
	}
	if e.NotCalled != nil && len(e.NotCalled) == 0 || e.InOrder != nil && len(e.InOrder) == 0 {
		v.Add(at, "must name a skill; exact: [] expects no call at all")
	}
	if e.Called != nil && (e.Called.Skill == "" || e.Called.Times < 0) {
		v.Add(at+".called", "must name a skill, and times must not be negative")
	}
	if e.Within != nil {
		v.checkDuration(at+".within.latency", e.Within.Latency)
		if *e.Within == (Within{}) || e.Within.Iterations < 0 || e.Within.CostUSD < 0 {
			v.Add(at+".within", "must have a positive limit: iterations, cost_usd or latency")
		}
	}
	if a := e.Answer; a != nil {
		v.checkAnswer(at+".answer", *a)
	}
	if e.Judge != nil {
		v.checkJudge(at+".judge", *e.Judge)
	}
}

func (v *validator) checkAnswer(at string, a Answer) {
	if a.Contains == "" && a.Lacks == "" && a.Regex == "" && a.MaxWords == 0 && a.Schema == nil && a.Expr == "" {
		v.Add(at, "is empty; write contains, lacks, regex, max_words, schema or expr")
	}
	if _, err := regexp.Compile(a.Regex); err != nil {
		v.Add(at+".regex", "%s", err)
	}
	if a.MaxWords < 0 {
		v.Add(at+".max_words", "must be positive")
	}
	if a.Schema != nil {
		if _, err := compile(a.Schema); err != nil {
			v.Add(at+".schema", "%s", err)
		}
	}
	if a.Expr != "" {
		if err := flows.CheckCondition(a.Expr); err != nil {
			v.Add(at+".expr", "%s", err)
		}
	}
}

// compile compiles the schema of an answer.
func compile(schemaOf map[string]any) (*jsonschema.Schema, error) {
	text, err := json.Marshal(schemaOf)
	if err != nil {
		return nil, err
	}
	return schema.Compile(text, func(*jsonschema.Compiler) {})
}

// Skills returns the skills that a suite names, by their path in the document. It omits delegate, which is a tool.
func Skills(d Definition) map[string]string {
	byPath := map[string]string{}
	add := func(at, skill string) {
		if skill != "delegate" {
			byPath[at] = skill
		}
	}
	for i, c := range d.Cases {
		at := fmt.Sprintf("cases[%d].", i)
		for skill := range c.Skills {
			add(at+"skills."+skill, skill)
		}
		for skill := range c.Approvals {
			add(at+"approvals."+skill, skill)
		}
		for j, e := range c.Expect {
			at := fmt.Sprintf("%sexpect[%d].", at, j)
			if e.Called != nil {
				add(at+"called.skill", e.Called.Skill)
			}
			if e.ApprovalAsked != "" {
				add(at+"approval_asked", e.ApprovalAsked)
			}
			for key, list := range map[string][]string{"not_called": e.NotCalled, "in_order": e.InOrder, "exact": e.Exact} {
				for k, skill := range list {
					add(fmt.Sprintf("%s%s[%d]", at, key, k), skill)
				}
			}
		}
	}
	return byPath
}

// TrialCount returns the number of trials of each case.
func (d Definition) TrialCount() int {
	if d.Trials == 0 {
		return DefaultTrials
	}
	return d.Trials
}

// gate returns the gate. For a suite without a gate it returns the zero value.
func (d Definition) gate() Gate {
	if d.ApplyGate == nil {
		return Gate{}
	}
	return *d.ApplyGate
}

// Margin returns the loss of the mean pass rate that still counts as not worse.
func (d Definition) Margin() float64 { return d.gate().Margin }

// SurfaceName returns the surface whose rules and skills the suite uses.
func (d Definition) SurfaceName() string { return cmp.Or(d.Surface, "chat") }

// Timeout returns the bound of a run.
func (d Definition) Timeout() time.Duration {
	if t, err := time.ParseDuration(d.Budget.Timeout); err == nil {
		return t
	}
	return 10 * time.Minute
}

// Case returns a case by name.
func (d Definition) Case(name string) (Case, bool) {
	i := slices.IndexFunc(d.Cases, func(c Case) bool { return c.Name == name })
	if i < 0 {
		return Case{}, false
	}
	return d.Cases[i], true
}
