package schemadoc

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

const opened = `# The schema

<!-- Written from the comments in migrations/schema by go test ./migrations -run TestTheSchemaPage -update. -->

The database is the contract between the processes of this program, and with others. This page is its text: what each
noun promises, then its tables, views and functions. The files of [migrations/schema](../migrations/schema) say the same
as SQL, in the same order. River's tables are in the schema "river". Two more tables, agent_migrations and
agent_schema_code, record the applied migrations.

The diagram has the key of each table, and the columns that name a row of another table. A solid line is a foreign key.
A dotted line has none: the writer keeps the reference correct, and the row may outlive the row that it names. In the
tables below, a type without *null* is never null. In a view, a column is null only where its meaning says so.
`

// Page is docs/schema.md.
func Page(nouns []*Noun) string {
	var b strings.Builder
	b.WriteString(opened + "\n")
	diagram(&b, nouns)
	for _, n := range nouns {
		fmt.Fprintf(&b, "- [%s](#%s)", n.Title, strings.ReplaceAll(strings.ToLower(n.Title), " ", "-"))
		for i, t := range n.Tables {
			mark := ", "
			if i == 0 {
				mark = ": "
			}
			b.WriteString(mark + link(t.Name))
		}
		b.WriteString("\n")
	}
	for _, n := range nouns {
		n.write(&b)
	}
	return b.String()
}

// diagram writes the tables with their keys and references, as a diagram of Mermaid.
func diagram(b *strings.Builder, nouns []*Noun) {
	b.WriteString("```mermaid\nerDiagram\n")
	for _, n := range nouns {
		for _, t := range n.Tables {
			fmt.Fprintf(b, "  %s {\n", t.Name)
			for _, column := range t.key() {
				fmt.Fprintf(b, "    key %s PK\n", column)
			}
			b.WriteString("  }\n")
			for _, f := range t.references() {
				line := ".."
				if f.firm {
					line = "--"
				}
				if f.firm || f.target != t.Name {
					fmt.Fprintf(b, "  %s ||%so{ %s : \"%s\"\n", f.target, line, t.Name, strings.Join(f.columns, ", "))
				}
			}
		}
	}
	b.WriteString("```\n\n")
}

func (n *Noun) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n## %s\n\n%s\n\nFile: [%s](../migrations/%s).\n", n.Title, n.Essay, path.Base(n.File), n.File)
	for _, t := range n.Tables {
		t.write(b)
	}
	if len(n.Closed)+len(n.Types) > 0 {
		fmt.Fprintf(b, "\n### Types of %s\n\n", strings.ToLower(n.Title))
	}
	for _, c := range n.Closed {
		fmt.Fprintf(b, "- `%s`%s: %s\n", c.Name, c.what(), c.Comment)
	}
	for _, t := range n.Types {
		fmt.Fprintf(b, "- `%s` (%s): %s\n", t.Name, t.columnList(), t.Comment)
	}
	for _, v := range n.Views {
		v.write(b)
	}
	if len(n.Calls) > 0 {
		fmt.Fprintf(b, "\n### Functions of %s\n\n", strings.ToLower(n.Title))
	}
	for _, f := range n.Calls {
		result := ""
		if f.Result != "" && f.Result != "void" {
			result = " → " + f.Result
		}
		fmt.Fprintf(b, "- `%s(%s)%s`<br>%s\n", f.Name, f.Arguments, result, f.Comment)
	}
}

func (c Closed) what() string {
	if c.Base == "" {
		return " (" + strings.Join(c.Values, ", ") + ")"
	}
	if values := oneOf.FindStringSubmatch(c.Check); values != nil {
		return " (" + strings.ReplaceAll(values[2], "'", "") + ")"
	}
	return fmt.Sprintf(" (`%s`, `%s`)", c.Base, c.Check)
}

func (r *Relation) columnList() string {
	var names []string
	for _, c := range r.Columns {
		names = append(names, fmt.Sprintf("`%s` %s", c.Name, c.Type))
	}
	return strings.Join(names, ", ")
}

// oneOf finds a check that is a list of values.
var oneOf = regexp.MustCompile(`^check \((?:\w+ is null or \()?(\w+) in \(([^)]*)\)\)?\)$`)

func (r *Relation) write(b *strings.Builder) {
	fmt.Fprintf(b, "\n### %s\n\n", r.Name)
	if r.Comment != "" {
		fmt.Fprintf(b, "%s\n\n", r.Comment)
	}
	b.WriteString("| Column | Type | Default | Meaning |\n|---|---|---|---|\n")
	values := map[string][]string{}
	var checks []string
	for _, c := range r.Constraints {
		if c.Kind != "c" {
			continue
		}
		if m := oneOf.FindStringSubmatch(c.Text); m != nil {
			values[m[1]] = strings.Split(strings.ReplaceAll(m[2], "'", ""), ", ")
		} else {
			text, _ := strings.CutPrefix(c.Text, "check (")
			checks = append(checks, "`"+strings.TrimSuffix(text, ")")+"`")
		}
	}
	for _, c := range r.Columns {
		r.row(b, c, values[c.Name])
	}
	if len(r.Constraints)+len(r.Indexes) > 0 {
		b.WriteString("\n")
	}
	r.keys(b)
	if len(checks) > 0 {
		fmt.Fprintf(b, "- Holds: %s.\n", strings.Join(checks, "; "))
	}
	for _, x := range r.Indexes {
		kind := "Index"
		if x.Unique {
			kind = "Unique"
		}
		fmt.Fprintf(b, "- %s `%s`", kind, x.Text)
		if x.Comment != "" {
			b.WriteString(": " + x.Comment)
		}
		b.WriteString("\n")
	}
}

// row writes the line of a column.
func (r *Relation) row(b *strings.Builder, c Column, values []string) {
	kind, preset := c.Type, ""
	if c.Null && r.Kind != "v" {
		kind += ", *null*"
	}
	if c.Default != "" {
		preset = "`" + c.Default + "`"
	}
	about := []string{c.Comment}
	for _, f := range r.references() {
		if slices.Contains(f.columns, c.Name) && f.target != r.Name {
			about = append(about, "→ "+link(f.target)+".")
		}
	}
	if slices.ContainsFunc(values, func(v string) bool { return v != "" && !strings.Contains(c.Comment, v) }) {
		about = append(about, strings.ReplaceAll("One of `"+strings.Join(values, "`, `")+"`.", "``", "`''`"))
	}
	text := strings.Join(strings.Fields(strings.Join(about, " ")), " ")
	cells := []string{"`" + c.Name + "`", kind, preset, text}
	for i := range cells {
		cells[i] = strings.ReplaceAll(cells[i], "|", `\|`)
	}
	fmt.Fprintf(b, "| %s |\n", strings.Join(cells, " | "))
}

// keys writes the keys and foreign keys.
func (r *Relation) keys(b *strings.Builder) {
	for _, c := range r.Constraints {
		columns := "`" + strings.Join(c.Columns, "`, `") + "`"
		switch c.Kind {
		case "p":
			fmt.Fprintf(b, "- Key: %s.\n", columns)
		case "u":
			fmt.Fprintf(b, "- Unique: %s.\n", columns)
		case "x":
			fmt.Fprintf(b, "- Holds: `%s`.\n", c.Text)
		case "f":
			fmt.Fprintf(b, "- %s refers to %s%s.\n", columns, link(c.Target), whenGone(c.Text))
		}
	}
}

func whenGone(text string) string {
	if strings.Contains(text, "on delete cascade") {
		return " and goes with it"
	}
	return ""
}

func link(table string) string { return fmt.Sprintf("[%s](#%s)", table, table) }
