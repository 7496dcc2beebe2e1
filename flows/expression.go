package flows

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/conf"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/vm"

	"github.com/lanekeeper/lanekeeper/internal/exactjson"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
	"github.com/lanekeeper/lanekeeper/internal/textcut"
)

// Bounds of an expression. Its cost is at most the expression's length times the size of the variables. Predicates
// over a list (all, any, …) do not nest and call nothing. Functions that build texts or lists in a loop (map, reduce,
// join, repeat, ranges) are not allowed.
const (
	maxExpression  = 2000    // bytes
	maxNodes       = 300     // nodes of the syntax tree
	maxAllocations = 100_000 // values that an expression may allocate
)

// classExpression is the error class of an expression that failed at run time.
const classExpression = "expression"

// allowedFunctions are the functions available to expressions.
var allowedFunctions = []string{
	"len", "lower", "upper", "trim", "int", "float", "string", "abs", "ceil", "floor", "round", "min", "max",
	"hasPrefix", "hasSuffix",
	"indexOf", "split", "first", "last", "keys", "values", "type", "toJSON", "fromJSON",
	"all", "any", "none", "one", "count", "filter", "find",
}

// expression is a compiled Expr program and the variables that it requires.
type expression struct {
	text    string
	program *vm.Program
	needs   []string
}

// compileExpression compiles an expression over the variables. The error names the position.
func compileExpression(text string) (*expression, error) {
	switch {
	case strings.TrimSpace(text) == "":
		return nil, errors.New("is empty")
	case len(text) > maxExpression:
		return nil, fmt.Errorf("must have at most %d bytes", maxExpression)
	case strings.Contains(text, "{{"):
		return nil, errors.New("is an expression, not a template: write variables without {{ }}")
	}
	inspection := &inspector{optional: map[ast.Node]bool{}, names: map[ast.Node]string{}, declared: map[string]bool{}}
	options := []expr.Option{
		expr.Env(map[string]any{}), expr.AllowUndefinedVariables(), expr.MaxNodes(maxNodes),
		expr.DisableAllBuiltins(), expr.Patch(inspection),
	}
	for _, name := range allowedFunctions {
		options = append(options, expr.EnableBuiltin(name))
	}
	// An identifier that is not called is a variable, even if it has the name of a function, such as count. The checker
	// uses Builtins only for identifiers; a call of a function is a BuiltinNode.
	options = append(options, func(c *conf.Config) { clear(c.Builtins) })
	program, err := expr.Compile(text, options...)
	if position, ok := errors.AsType[*file.Error](err); ok {
		message := strings.Replace(position.Message, `Operator("=")`, `"="; write == to compare`, 1)
		return nil, fmt.Errorf("%s (line %d, column %d)", message, position.Line, position.Column+1)
	}
	if err != nil {
		return nil, err
	}
	if inspection.problem != "" {
		return nil, errors.New(inspection.problem)
	}
	return &expression{text: text, program: program, needs: inspection.needs()}, nil
}

// inspector collects the required names of a syntax tree and rejects nodes with unbounded cost. It visits leaves first.
type inspector struct {
	names    map[ast.Node]string // the identifiers
	optional map[ast.Node]bool   // identifiers that may be unset: left of ??, or before ?.
	declared map[string]bool     // names declared by let
	problem  string
}

// Visit implements ast.Visitor.
func (l *inspector) Visit(node *ast.Node) {
	switch n := (*node).(type) {
	case *ast.IdentifierNode:
		l.names[n] = n.Value
	case *ast.VariableDeclaratorNode:
		l.declared[n.Name] = true
	case *ast.MemberNode:
		if n.Optional {
			l.allowUnset(n.Node)
		}
	case *ast.BinaryNode:
		switch n.Operator {
		case "??":
			l.allowUnset(n.Left)
		case "..":
			l.problem = "ranges are not offered; use for_each or while"
		case "**", "^":
			l.problem = "powers are not offered"
		}
	case *ast.PredicateNode:
		walkTree(n.Node, func(inner ast.Node) {
			switch i := inner.(type) {
			case *ast.BuiltinNode, *ast.CallNode: // a call may loop, too
				l.problem = "calls within a loop over a list are not offered; use for_each"
			case *ast.BinaryNode:
				if i.Operator == "+" {
					l.problem = "+ within a loop over a list is not offered; use for_each"
				}
			}
		})
	}
}

// allowUnset lets the identifiers of a subtree be unset.
func (l *inspector) allowUnset(tree ast.Node) {
	walkTree(tree, func(n ast.Node) {
		if _, ok := n.(*ast.IdentifierNode); ok {
			l.optional[n] = true
		}
	})
}

func (l *inspector) needs() []string {
	needed := map[string]bool{}
	for node, name := range l.names {
		if !l.optional[node] && !l.declared[name] && name != "$env" {
			needed[name] = true
		}
	}
	return slices.Sorted(maps.Keys(needed))
}

// walkTree calls visit for every node of a tree.
func walkTree(tree ast.Node, visit func(ast.Node)) {
	ast.Walk(&tree, nodeVisitor(visit))
}

type nodeVisitor func(ast.Node)

// Visit implements ast.Visitor.
func (v nodeVisitor) Visit(node *ast.Node) { v(*node) }

// value evaluates the expression.
func (e *expression) value(vars map[string]any) (any, error) {
	for _, name := range e.needs {
		if _, known := vars[name]; !known {
			hint := ""
			if similar := nearest.To(name, slices.Sorted(maps.Keys(vars))); similar != "" {
				hint = fmt.Sprintf(", did you mean %q?", similar)
			}
			return nil, classErrorf(classTemplate, "variable %q is not known%s; set it before, or write (%s ?? …)", name, hint, name)
		}
	}
	machine := vm.VM{MemoryBudget: maxAllocations}
	result, err := machine.Run(e.program, vars)
	if at, ok := errors.AsType[*file.Error](err); ok {
		err = fmt.Errorf("%s (line %d, column %d)", at.Message, at.Line, at.Column+1)
	}
	if err == nil {
		result, err = normalize(result)
	}
	if err != nil {
		return nil, classErrorf(classExpression, "%s: %s", truncate(e.text), err)
	}
	return result, nil
}

// boolValue evaluates a condition.
func (e *expression) boolValue(vars map[string]any) (bool, error) {
	value, err := e.value(vars)
	if err != nil {
		return false, err
	}
	truth, ok := value.(bool)
	if !ok {
		return false, classErrorf(classExpression, "%s: is %s, not true or false", truncate(e.text),
			truncate(encodeJSON(value)))
	}
	return truth, nil
}

// classTemplate is the error class of a template that failed at run time.
const classTemplate = "template"

// template is a text with references to variables.
type template struct {
	parts []part
}

// part is a piece of text, or a reference.
type part struct {
	text string
	ref  *variableRef
}

// variableRef is the text between {{ and }}.
type variableRef struct {
	path         []string // a name, then keys and indexes
	defaultValue any
	hasDefault   bool
}

var (
	referencePath = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*(\.[a-zA-Z0-9_-]+)*$`)
	defaultFilter = regexp.MustCompile(`^default\s*:\s*(.+)$`)
)

// parseTemplate parses a text. It returns nil if the text has no template.
func parseTemplate(text string) (*template, error) {
	if !strings.Contains(text, "{{") {
		return nil, nil
	}
	t := &template{}
	for rest := text; rest != ""; {
		before, after, found := strings.Cut(rest, "{{")
		if before != "" {
			t.parts = append(t.parts, part{text: before})
		}
		if !found {
			break
		}
		inner, next, closed := cutReference(after)
		if !closed {
			return nil, fmt.Errorf("the template {{%s is not closed with }}", truncate(after))
		}
		piece, err := parseReference(strings.TrimSpace(inner))
		if err != nil {
			return nil, fmt.Errorf("the template {{%s}} %w", truncate(inner), err)
		}
		t.parts = append(t.parts, piece)
		rest = next
	}
	return t, nil
}

// cutReference cuts at the closing }} outside quotes.
func cutReference(text string) (inner, rest string, closed bool) {
	var quote byte
	for i := 0; i < len(text); i++ {
		switch {
		case quote != 0 && text[i] == '\\':
			i++
		case quote != 0:
			if text[i] == quote {
				quote = 0
			}
		case text[i] == '"' || text[i] == '\'':
			quote = text[i]
		case strings.HasPrefix(text[i:], "}}"):
			return text[:i], text[i+2:], true
		}
	}
	return text, "", false
}

func parseReference(inner string) (part, error) {
	if strings.HasPrefix(inner, `"`) || strings.HasPrefix(inner, "'") {
		value, err := parseDefault(inner)
		text, isText := value.(string)
		if err != nil || !isText {
			return part{}, errors.New("is not a text in quotes")
		}
		return part{text: text}, nil
	}
	path, defaultText := inner, ""
	if before, after, found := strings.Cut(inner, "??"); found {
		path, defaultText = strings.TrimSpace(before), strings.TrimSpace(after)
	} else if before, after, found := strings.Cut(inner, "|"); found {
		match := defaultFilter.FindStringSubmatch(strings.TrimSpace(after))
		if match == nil {
			return part{}, errors.New(`knows no other filter than default: write {{name | default: "x"}}`)
		}
		path, defaultText = strings.TrimSpace(before), match[1]
	}
	if !referencePath.MatchString(path) {
		return part{}, errors.New(`is not the name of a variable: write {{name}}, {{a.b}} or {{name ?? "x"}}`)
	}
	ref := &variableRef{path: strings.Split(path, ".")}
	if path != inner {
		value, err := parseDefault(defaultText)
		if err != nil {
			return part{}, errors.New(`has a default that is no text in quotes, number, true, false or null`)
		}
		ref.defaultValue, ref.hasDefault = value, true
	}
	return part{ref: ref}, nil
}

// parseDefault parses a default value: JSON, or a text in single quotes.
func parseDefault(text string) (any, error) {
	if n := len(text); n >= 2 && text[0] == '\'' && text[n-1] == '\'' {
		return text[1 : n-1], nil
	}
	if !json.Valid([]byte(text)) {
		return nil, errors.New("is not JSON")
	}
	return decodeNormal(json.RawMessage(text))
}

// isSingleReference reports whether the template is one reference without further text.
func (t *template) isSingleReference() bool { return len(t.parts) == 1 && t.parts[0].ref != nil }

// value fills in the template. A single reference keeps the type of its value.
func (t *template) value(vars map[string]any) (any, error) {
	if t.isSingleReference() {
		return t.parts[0].ref.value(vars)
	}
	var b strings.Builder
	for _, p := range t.parts {
		if p.ref == nil {
			b.WriteString(p.text)
			continue
		}
		value, err := p.ref.value(vars)
		if err != nil {
			return nil, err
		}
		if value == nil && !p.ref.hasDefault {
			return nil, classErrorf(classTemplate, "variable %q is null; give it a default: {{%s ?? \"…\"}}", p.ref, p.ref)
		}
		b.WriteString(formatText(value))
	}
	return b.String(), nil
}

func (r *variableRef) String() string { return strings.Join(r.path, ".") }

// value resolves the path. The default replaces null, too.
func (r *variableRef) value(vars map[string]any) (any, error) {
	var at any = vars
	for i, key := range r.path {
		next, found := lookUp(at, key)
		switch {
		case !found && r.hasDefault:
			return r.defaultValue, nil
		case !found:
			return nil, r.missing(vars, i)
		}
		at = next
	}
	if at == nil && r.hasDefault {
		return r.defaultValue, nil
	}
	return at, nil
}

func (r *variableRef) missing(vars map[string]any, depth int) error {
	hint := ""
	if near := nearest.To(r.path[0], slices.Sorted(maps.Keys(vars))); depth == 0 && near != "" {
		hint = fmt.Sprintf(", did you mean %q?", near)
	}
	return classErrorf(classTemplate, "variable %q is not known%s; set it before, or give it a default: {{%s ?? \"…\"}}", r,
		hint, r)
}

// lookUp returns the value of a map's key, or the item at a list's index.
func lookUp(container any, key string) (any, bool) {
	switch v := container.(type) {
	case map[string]any:
		value, found := v[key]
		return value, found
	case []any:
		i, err := strconv.Atoi(key)
		if err != nil || i < 0 || i >= len(v) {
			return nil, false
		}
		return v[i], true
	}
	return nil, false
}

// formatText formats a value within a text. A list of scalars is joined by commas; other structures are JSON.
func formatText(value any) string {
	switch v := value.(type) {
	case nil:
		return ""
	case string:
		return v
	case []any:
		words := make([]string, len(v))
		for i, item := range v {
			switch item.(type) {
			case []any, map[string]any:
				return encodeJSON(value)
			}
			words[i] = formatText(item)
		}
		return strings.Join(words, ", ")
	case map[string]any:
		return encodeJSON(value)
	case float64:
		return strconv.FormatFloat(v, 'f', -1, 64)
	}
	return fmt.Sprint(value)
}

func encodeJSON(value any) string {
	text, err := exactjson.Encode(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(text)
}

// parseTree parses the templates in a value's texts. A text with one becomes *template.
func parseTree(value any, path string, report func(path string, err error)) any {
	switch v := value.(type) {
	case string:
		t, err := parseTemplate(v)
		if err != nil {
			report(path, err)
		}
		if t != nil {
			return t
		}
	case []any:
		tree := make([]any, len(v))
		for i, item := range v {
			tree[i] = parseTree(item, fmt.Sprintf("%s[%d]", path, i), report)
		}
		return tree
	case map[string]any:
		tree := make(map[string]any, len(v))
		for key, item := range v {
			tree[key] = parseTree(item, path+"."+key, report)
		}
		return tree
	}
	return value
}

// fill returns a tree with its templates filled in.
func fill(tree any, vars map[string]any) (any, error) {
	switch v := tree.(type) {
	case *template:
		return v.value(vars)
	case []any:
		list := make([]any, len(v))
		for i, item := range v {
			value, err := fill(item, vars)
			if err != nil {
				return nil, err
			}
			list[i] = value
		}
		return list, nil
	case map[string]any:
		filled := make(map[string]any, len(v))
		for _, key := range slices.Sorted(maps.Keys(v)) {
			value, err := fill(v[key], vars)
			if err != nil {
				return nil, err
			}
			filled[key] = value
		}
		return filled, nil
	}
	return tree, nil
}

// truncate cuts a text for a message.
func truncate(text string) string { return textcut.Text(text, 60) }

// CheckCondition returns an error if a text is not a condition: an expression over variables, as in flows.
func CheckCondition(text string) error {
	_, err := compileExpression(text)
	return err
}

// Condition evaluates a condition over variables. The variables are decoded JSON values.
func Condition(text string, vars map[string]any) (bool, error) {
	compiled, err := compileExpression(text)
	if err != nil {
		return false, err
	}
	return compiled.boolValue(vars)
}
