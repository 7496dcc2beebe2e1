package workspace

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/automations"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/flows"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

// flowRow is a flow in a diff, with its actions as text.
type flowRow struct {
	Description string         `json:"description"`
	Input       map[string]any `json:"input"`
	Variables   map[string]any `json:"variables"`
	Channel     string         `json:"channel"`
	Target      string         `json:"target"`
	Actions     string         `json:"actions"`
	Version     int            `json:"version"`
	Source      string         `json:"source"`
}

// flowTable applies flow documents. Old versions stay, because running executions use them.
func flowTable(w Workspace) kindApplier {
	return kindTable[flows.Definition, flowRow]{
		kind: "flow", documents: w.Flows, name: func(d flows.Definition) string { return d.Name },
		get:      getFlow,
		put:      withTx(flows.Put),
		notFound: flows.ErrNotFound, remove: flows.Remove,
		declared: []string{"description", "input", "variables", "channel", "target", "actions", "version", "source"},
	}
}

func getFlow(ctx context.Context, db postgres.DB, name string) (flowRow, error) {
	f, err := flows.Get(ctx, db, name)
	if err != nil {
		return flowRow{}, err
	}
	actions, err := json.MarshalIndent(f.Definition.Actions, "", "  ")
	if err != nil {
		return flowRow{}, fmt.Errorf("show flow %s: %w", name, err)
	}
	d := f.Definition
	return flowRow{d.Description, d.Input, d.Variables, d.Channel, d.Target, string(actions), f.Version, f.Source}, nil
}

// checkFlows requires names different from Go flows, and existing child flows and skills, in the transaction's state.
// It returns [Problems].
func checkFlows(ctx context.Context, db postgres.DB, w Workspace) error {
	if len(w.Flows) == 0 {
		return nil
	}
	names, err := flowNames(ctx, db)
	if err != nil {
		return err
	}
	acting, err := agentNames(ctx, db)
	if err != nil {
		return err
	}
	known := append(names, w.GoFlows...)
	var problems Problems
	for _, document := range w.Flows {
		w.checkFlowAgents(document, acting, &problems)
		if name := document.Definition.Name; slices.Contains(w.GoFlows, name) || slices.Contains(w.Reserved, name) {
			problems.add(document.position("name"), "name: %q is a flow of the program itself; choose another name", name)
		}
		started := flows.Triggers(document.Definition)
		for _, path := range slices.Sorted(maps.Keys(started)) {
			name := started[path]
			if !slices.Contains(known, name) {
				problems.add(document.position(path), "%s: %s", path, unknownFlow(name, known))
			}
		}
		if err := checkSkills(ctx, db, document, &problems); err != nil {
			return err
		}
	}
	return problems.err()
}

// checkFlowAgents requires the agents of a flow to exist, and its name to differ from all agents.
func (w Workspace) checkFlowAgents(document Document[flows.Definition], acting []string, problems *Problems) {
	own := document.Definition.Name
	declares := func(d Document[agents.Definition]) bool { return d.Definition.Name == own }
	if slices.Contains(acting, own) && !slices.ContainsFunc(w.Agents, declares) { // checkAgents reports such names
		problems.add(document.position("name"), "name: %q is the name of an agent; agents and flows share one namespace", own)
	}
	named := flows.Agents(document.Definition)
	for _, path := range slices.Sorted(maps.Keys(named)) {
		if name := named[path]; !slices.Contains(acting, name) {
			problems.add(document.position(path), "%s: %s", path, unknownName("agent", name, name, acting))
		}
	}
}

// checkSkills requires the skills of a flow to exist.
func checkSkills(ctx context.Context, db postgres.DB, document Document[flows.Definition], problems *Problems) error {
	called := flows.Skills(document.Definition)
	for _, path := range slices.Sorted(maps.Keys(called)) {
		_, err := skills.Get(ctx, db, called[path])
		if err == nil {
			continue
		}
		if !errors.Is(err, skills.ErrNotFound) {
			return err
		}
		known, err := skillNames(ctx, db)
		if err != nil {
			return err
		}
		problems.add(document.position(path), "%s: there is no skill %q%s", path, called[path],
			suggestion(called[path], known))
	}
	return nil
}

// flowNames lists the current data flows.
func flowNames(ctx context.Context, db postgres.DB) ([]string, error) {
	var names []string
	for {
		after := ""
		if len(names) > 0 {
			after = names[len(names)-1]
		}
		page, err := flows.List(ctx, db, flows.Filter{After: after, Limit: 500})
		if err != nil {
			return nil, err
		}
		for _, f := range page {
			names = append(names, f.Name)
		}
		if len(page) < 500 {
			return names, nil
		}
	}
}

// checkTargets requires the flows of skills, automations and webhooks to exist: as data, in Go, or external. It
// requires the automations of webhooks to exist. It returns [Problems].
func checkTargets(ctx context.Context, db postgres.DB, w Workspace) error {
	problems, err := unknownAutomations(ctx, db, w.Webhooks)
	if err != nil {
		return err
	}
	targets := w.flowTargets()
	if len(targets) == 0 {
		return problems.err()
	}
	names, err := flowNames(ctx, db)
	if err != nil {
		return err
	}
	known := append(names, w.GoFlows...)
	there := make(map[string]bool, len(known))
	for _, name := range known {
		there[name] = true
	}
	for _, t := range targets {
		if !there[t.flow] && !executions.IsExternal(t.flow) {
			problems.add(t.at, "%s: %s", t.path, unknownFlow(t.flow, known))
		}
	}
	return problems.err()
}

// unknownAutomations reports the actions of webhooks that name no automation.
func unknownAutomations(
	ctx context.Context, db postgres.DB, all []Document[webhooks.EndpointDefinition],
) (problems Problems, err error) {
	for _, d := range all {
		for i, action := range d.Definition.Actions {
			if action.Automation == "" {
				continue
			}
			_, err := automations.Get(ctx, db, action.Automation)
			if err == nil {
				continue
			}
			if !errors.Is(err, automations.ErrNotFound) {
				return nil, err
			}
			known, err := postgres.Names(ctx, db, "list automations", `select name from agent_automations limit 1000`)
			if err != nil {
				return nil, err
			}
			path := fmt.Sprintf("actions[%d].automation", i)
			problems.add(d.position(path), "%s: there is no automation %q%s", path, action.Automation,
				suggestion(action.Automation, known))
		}
	}
	return problems, nil
}

// flowTarget is a reference to a flow in a file.
type flowTarget struct {
	at         Position
	path, flow string
}

func (w Workspace) flowTargets() (all []flowTarget) {
	for _, d := range w.Skills {
		kind, name, _ := strings.Cut(strings.TrimSpace(d.Definition.Handler), ":")
		if kind == "flow" {
			all = append(all, flowTarget{d.position("handler"), "handler", strings.TrimSpace(name)})
		}
	}
	for _, d := range w.Automations {
		if d.Definition.Flow != "" {
			all = append(all, flowTarget{d.position("flow"), "flow", d.Definition.Flow})
		}
	}
	for _, d := range w.Webhooks {
		for i, action := range d.Definition.Actions {
			if path := fmt.Sprintf("actions[%d].flow", i); action.Flow != "" {
				all = append(all, flowTarget{d.position(path), path, action.Flow})
			}
		}
	}
	return all
}

// offsetPosition returns the position of a byte of a text value. YAML folds and indents texts. So offsetPosition counts
// non-space characters, whose order is the same in file and value.
func (s source) offsetPosition(path string, offset int) Position {
	node := s.find(path)
	start := position(s.file, node)
	value := node.Value[:min(offset, len(node.Value))]
	lines := strings.SplitAfter(string(s.raw), "\n")
	if node.Line < 1 || node.Line > len(lines) {
		return start
	}
	text, at := lines[node.Line-1:], start
	if node.Style&(yaml.LiteralStyle|yaml.FoldedStyle) != 0 && len(text) > 1 {
		text = text[1:]
		at = Position{File: s.file, Line: node.Line + 1, Column: 1}
	} else {
		text[0] = dropRunes(text[0], node.Column-1)
	}
	walk := scanner{rest: strings.Join(text, ""), at: at, style: node.Style}
	walk.skipQuote()
	for _, r := range value {
		if !unicode.IsSpace(r) && !walk.readRune() {
			return start
		}
	}
	walk.skipSpaces()
	return walk.at
}

// dropRunes drops the first n characters of a line.
func dropRunes(line string, n int) string {
	for ; n > 0 && line != ""; n-- {
		_, wide := utf8.DecodeRuneInString(line)
		line = line[wide:]
	}
	return line
}

// scanner reads the source of a text value.
type scanner struct {
	rest  string
	at    Position
	style yaml.Style
}

func (w *scanner) read() rune {
	r, wide := utf8.DecodeRuneInString(w.rest)
	w.rest = w.rest[wide:]
	if r == '\n' {
		w.at.Line, w.at.Column = w.at.Line+1, 1
	} else if wide > 0 {
		w.at.Column++
	}
	return r
}

// skipQuote skips an opening quote.
func (w *scanner) skipQuote() {
	if w.style&(yaml.SingleQuotedStyle|yaml.DoubleQuotedStyle) != 0 {
		w.read()
	}
}

// skipSpaces skips spaces, which may differ between source and value.
func (w *scanner) skipSpaces() {
	for w.rest != "" {
		r, _ := utf8.DecodeRuneInString(w.rest)
		escaped := w.style&yaml.DoubleQuotedStyle != 0 && r == '\\' && len(w.rest) > 1
		switch {
		case unicode.IsSpace(r):
			w.read()
		case escaped && strings.ContainsRune("ntr \n", rune(w.rest[1])):
			w.read()
			w.read()
		default:
			return
		}
	}
}

// readRune skips the source of one non-space character; false at the end of the file.
func (w *scanner) readRune() bool {
	w.skipSpaces()
	if w.rest == "" {
		return false
	}
	r := w.read()
	doubled := r == '\'' && w.style&yaml.SingleQuotedStyle != 0
	escaped := r == '\\' && w.style&yaml.DoubleQuotedStyle != 0
	if doubled || escaped {
		w.read()
	}
	return true
}

// unknownFlow reports an unknown flow, and names the known flows, without those that only the program starts.
func unknownFlow(name string, known []string) string {
	if suggestion(name, known) != "" {
		return unknownName("flow", name, name, known)
	}
	others := slices.DeleteFunc(slices.Clone(known), executions.IsReserved)
	return unknownName("flow", name, name, others) + "; a flow in Go is known while a program that registers it runs"
}
