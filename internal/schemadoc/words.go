// Package schemadoc writes docs/schema.md. The chapters are the files of migrations/schema, in their order, then those
// of migrations/changes that open with a noun. A chapter has the head of the file, then its tables, types, views and
// functions. A migrated database describes them. The test of package migrations compares the document, and writes it
// with -update.
package schemadoc

import (
	"fmt"
	"io/fs"
	"regexp"
	"slices"
	"strings"
)

// plain are self-explanatory names of columns.
var plain = strings.Fields(`id name description created_at updated_at trace_id execution_id thread_id title reason
	skill_name skill_revision version revision error_message enabled url`)

// refersTo names the target of a column without a foreign key: by table and column, or by column alone.
var refersTo = map[string]string{
	"execution_id": "agent_executions", "lender": "agent_executions", "borrower": "agent_executions",
	"consumed_by": "agent_executions", "forked_from": "agent_executions",
	"thread_id": "agent_threads", "activity_id": "agent_activity", "cause_id": "agent_activity",
	"event_id": "agent_events", "skill_id": "agent_skills", "claimed_by": "agent_workers", "worker": "agent_workers",
	"agent_executions.parent_id": "agent_executions", "agent_activity.parent_id": "agent_activity",
	"agent_lock_waiters.lane": "agent_locks", "agent_lane_holds.lane": "agent_locks",
	"agent_approvals.skill_name": "agent_skills", "agent_mcp_tools.skill_name": "agent_skills",
	"agent_mcp_calls.skill_name": "agent_skills", "agent_automations.skill_name": "agent_skills",
	"agent_webhook_deliveries.endpoint": "agent_webhook_endpoints",
	"agent_prompts.tools":               "agent_prompt_parts", "agent_prompts.messages": "agent_prompt_parts",
}

// reference is a table that a column refers to.
type reference struct {
	columns []string
	target  string
	firm    bool // a foreign key
	text    string
}

// references are the targets of a table's columns: foreign keys first, then by refersTo.
func (r *Relation) references() []reference {
	var all []reference
	var held []string
	for _, c := range r.Constraints {
		if c.Kind == "f" {
			all = append(all, reference{c.Columns, c.Target, true, c.Text})
			held = append(held, c.Columns...)
		}
	}
	for _, c := range r.Columns {
		target := refersTo[r.Name+"."+c.Name]
		if target == "" {
			target = refersTo[c.Name]
		}
		if target != "" && !slices.Contains(held, c.Name) {
			all = append(all, reference{columns: []string{c.Name}, target: target})
		}
	}
	return all
}

// key are the columns of the primary key.
func (r *Relation) key() []string {
	for _, c := range r.Constraints {
		if c.Kind == "p" {
			return c.Columns
		}
	}
	return nil
}

// Missing lists objects without a required comment, and references to tables that do not exist.
func Missing(nouns []*Noun) []string {
	var all []string
	need := func(comment, name string) {
		if comment == "" {
			all = append(all, name)
		}
	}
	tables := map[string]bool{}
	for _, n := range nouns {
		for _, r := range n.Tables {
			tables[r.Name] = true
		}
	}
	for _, n := range nouns {
		for _, r := range slices.Concat(n.Tables, n.Views, n.Types) {
			need(r.Comment, r.Name)
		}
		for _, r := range n.Tables {
			for _, c := range r.Columns {
				if !slices.Contains(plain, c.Name) {
					need(c.Comment, r.Name+"."+c.Name)
				}
			}
			for _, x := range r.Indexes {
				need(x.Comment, x.Name)
			}
			for _, f := range r.references() {
				if !tables[f.target] {
					all = append(all, fmt.Sprintf("%s in refersTo of %s", f.target, r.Name))
				}
			}
		}
		for _, f := range n.Calls {
			need(f.Comment, f.Name+"()")
		}
		for _, c := range n.Closed {
			need(c.Comment, c.Name)
		}
	}
	return all
}

// Noun is a chapter of the page: a file of migrations/schema, or of migrations/changes.
type Noun struct {
	File   string // schema/020_lanes.sql
	Title  string // Lanes
	Essay  string // the head of the file, as Markdown
	Tables []*Relation
	Views  []*Relation
	Types  []*Relation
	Closed []Closed
	Calls  []Function
}

var (
	// made finds the objects that a file creates in the schema of the tables.
	made = regexp.MustCompile(`(?m)^create (?:or replace )?(?:table|view|type|domain|function) ([a-z0-9_]+)\b[^.]`)
	// opening is the first line of a file: "Lanes: the right to act".
	opening = regexp.MustCompile(`^([A-Z][a-z ]+)([:.,])`)
)

// readNouns reads the files, and records the file and the place that create each name.
func readNouns(files fs.FS) ([]*Noun, map[string]place, error) {
	paths, err := fs.Glob(files, "schema/*.sql")
	if err != nil {
		return nil, nil, fmt.Errorf("list the schema: %w", err)
	}
	var nouns []*Noun
	places := map[string]place{}
	for i, p := range paths {
		text, err := fs.ReadFile(files, p)
		if err != nil {
			return nil, nil, fmt.Errorf("read the schema: %w", err)
		}
		n := &Noun{File: p, Essay: head(string(text))}
		first := opening.FindStringSubmatch(n.Essay)
		if first == nil {
			return nil, nil, fmt.Errorf("%s does not open with its noun, as in `-- Lanes: the right to act.`", n.File)
		}
		n.Title, n.Essay = first[1], essay(strings.TrimPrefix(n.Essay, first[0]))
		for j, m := range made.FindAllStringSubmatch(string(text), -1) {
			if _, known := places[m[1]]; !known {
				places[m[1]] = place{i, j}
			}
		}
		nouns = append(nouns, n)
	}
	nouns, err = readChanges(files, nouns, places)
	return nouns, places, err
}

// readChanges adds the tables of later changes: to the chapter that the file names, or as a chapter of their own.
func readChanges(files fs.FS, nouns []*Noun, places map[string]place) ([]*Noun, error) {
	paths, err := fs.Glob(files, "changes/*.sql")
	if err != nil {
		return nil, fmt.Errorf("list the changes: %w", err)
	}
	for i, p := range paths {
		text, err := fs.ReadFile(files, p)
		if err != nil {
			return nil, fmt.Errorf("read the changes: %w", err)
		}
		intro := head(string(text))
		first := opening.FindStringSubmatch(intro)
		tables := made.FindAllStringSubmatch(string(text), -1)
		if first == nil || tables == nil {
			continue
		}
		at := slices.IndexFunc(nouns, func(n *Noun) bool { return n.Title == first[1] })
		if at < 0 {
			at = len(nouns)
			nouns = append(nouns, &Noun{
				File: p, Title: first[1], Essay: essay(strings.TrimPrefix(intro, first[0])),
			})
		}
		for j, m := range tables {
			if _, known := places[m[1]]; !known {
				places[m[1]] = place{at, (i+1)*1000 + j}
			}
		}
	}
	return nouns, nil
}

// place is the place that creates a name: the file's number, and the statement's number in it.
type place struct{ file, statement int }

// find is the place of a name. A name of a later change is placed with the known name that has the same beginning.
func find(places map[string]place, name string) place {
	at, known := places[name]
	for part := name; !known && part != ""; part = part[:len(part)-1] {
		for other, p := range places {
			if strings.HasPrefix(other, part) && (!known || p.before(at)) {
				at, known = p, true
			}
		}
	}
	return at
}

func (p place) before(q place) bool {
	return p.file < q.file || p.file == q.file && p.statement < q.statement
}

// essay is the text after the noun: a sentence of its own.
func essay(text string) string {
	text = strings.TrimSpace(text)
	return strings.ToUpper(text[:1]) + text[1:]
}

// head is the comment at the start of a file, without its marks.
func head(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\n")
		if !strings.HasPrefix(line, "--") {
			break
		}
		lines = append(lines, strings.TrimPrefix(strings.TrimPrefix(line, "--"), " "))
	}
	return strings.Join(lines, "\n")
}
