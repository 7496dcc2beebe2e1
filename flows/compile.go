package flows

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/nearest"
)

// action is one compiled action.
type action struct {
	Action // the specification of its type

	key    string // key of its record: the id, or type and position
	when   *expression
	saveAs string
	params map[string]any // the parameters without nested actions and expressions, with parsed templates
	exprs  map[string]*expression
	flow   string // the flow that trigger_agent starts

	flowPath string            // path of that reference in the definition
	skills   map[string]string // referenced skills, by path
	agents   map[string]string // referenced agents, by path

	timeout        time.Duration // 0 means the default of the kind of wait
	onTimeout      string
	timeoutActions []*action

	nested map[string][]*action // then, else, actions, default
	cases  []branch
}

// branch is one case of a switch.
type branch struct {
	condition *expression // nil if the case has equals
	equals    any         // with templates
	actions   []*action
}

// walk calls fn for an action and all nested ones.
func (a *action) walk(fn func(*action)) {
	fn(a)
	lists := [][]*action{a.timeoutActions}
	for _, list := range a.nested {
		lists = append(lists, list)
	}
	for _, c := range a.cases {
		lists = append(lists, c.actions)
	}
	for _, inner := range slices.Concat(lists...) {
		inner.walk(fn)
	}
}

// needsThread reports whether an action fails without a thread. A request fails only with a message of its own.
func (a *action) needsThread() bool {
	return slices.Contains([]string{"send_message", "open_thread", "wait_for_response"}, a.Type) ||
		a.Waits != "" && a.params["message"] != nil
}

// branches reports whether an action may be skipped or may run nested actions.
func (a *action) branches() bool {
	return a.when != nil || len(a.nested)+len(a.cases)+len(a.timeoutActions) > 0
}

// flag returns a boolean parameter.
func (a *action) flag(name string, fallback bool) bool {
	if value, ok := a.params[name].(bool); ok {
		return value
	}
	return fallback
}

// compiler compiles a definition and collects its problems.
type compiler struct {
	problems []error
	ids      map[string]string // the path of each id
	count    int
}

func (c *compiler) add(path, format string, args ...any) {
	c.problems = append(c.problems, fmt.Errorf("%s: %s", path, fmt.Sprintf(format, args...)))
}

// addUnknown adds the problem of an unknown name and suggests a similar name.
func (c *compiler) addUnknown(path, what, name string, known []string) {
	if near := nearest.To(name, known); near != "" {
		c.add(path, "unknown %s %q; did you mean %q?", what, truncate(name), near)
		return
	}
	c.add(path, "unknown %s %q; known are %s", what, truncate(name), joinNames(known))
}

var (
	idRegexp       = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)
	variableRegexp = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]{0,63}$`)
	skillRegexp    = regexp.MustCompile(`^[a-zA-Z0-9_-]{1,64}$`)
	agentRegexp    = regexp.MustCompile(`^[a-zA-Z][a-zA-Z0-9_-]{0,63}$`)
)

// reserved has the variables that the runtime sets, and keywords those of the expression language.
var (
	reserved = []string{"input", "executionId", "traceId", "threadId"}
	keywords = []string{
		"true", "false", "nil", "null", "not", "in", "and", "or", "let", "if", "else", "matches",
		"contains", "startsWith", "endsWith",
	}
)

func (c *compiler) variable(path, name string) {
	switch {
	case !variableRegexp.MatchString(name):
		c.add(path, "%q is not the name of a variable: a letter or _, then 0 to 63 of the characters a-z A-Z 0-9 _", name)
	case slices.Contains(reserved, name):
		c.add(path, "%q is set by the runtime; choose another name", name)
	case slices.Contains(keywords, name):
		c.add(path, "%q is a word of the expression language; choose another name", name)
	}
}

func (c *compiler) actions(given any, path string, depth int) []*action {
	list, ok := given.([]any)
	if !ok {
		c.add(path, "must be a list of actions")
		return nil
	}
	if depth > maxNesting {
		c.add(path, "is nested more than %d deep; make it a flow of its own", maxNesting)
		return nil
	}
	all := make([]*action, 0, len(list))
	for i, item := range list {
		if a := c.action(item, fmt.Sprintf("%s[%d]", path, i), i+1, depth); a != nil {
			all = append(all, a)
		}
	}
	return all
}

// action reads one action; nil if its type is unknown.
func (c *compiler) action(given any, path string, position, depth int) *action {
	c.count++
	fields, ok := given.(map[string]any)
	if !ok {
		c.add(path, "must be an action: a mapping that has actionType")
		return nil
	}
	kind, isText := fields["actionType"].(string)
	spec, known := specs[kind]
	switch {
	case fields["actionType"] == nil:
		c.add(path, "actionType is missing; write actionType: send_message, or another")
		return nil
	case !isText || !known:
		c.addUnknown(path+".actionType", "actionType", fmt.Sprint(fields["actionType"]), typeNames())
		return nil
	}
	a := &action{
		Action: spec, key: fmt.Sprintf("%s %d", kind, position), params: map[string]any{}, exprs: map[string]*expression{},
		nested: map[string][]*action{}, onTimeout: onFail,
	}
	c.readCommonKeys(a, fields, path)
	parameters := map[string]any{}
	if given, has := fields["parameters"]; has {
		if parameters, ok = given.(map[string]any); !ok {
			c.add(path+".parameters", "must be a mapping of names to values")
			return a
		}
	}
	c.parameters(a, parameters, path+".parameters", depth)
	c.timeouts(a, fields, parameters, path, depth)
	return a
}

func typeNames() []string { return slices.Sorted(maps.Keys(specs)) }

// readCommonKeys reads the keys beside an action's parameters.
func (c *compiler) readCommonKeys(a *action, fields map[string]any, path string) {
	known := slices.Clone(commonKeys)
	if a.Waits != "" {
		known = append(known, timeoutKeys...)
	}
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		switch {
		case slices.Contains(known, key):
		case slices.Contains(timeoutKeys, key):
			c.add(path+"."+key, "%s does not wait and has no %s", a.Type, key)
		default:
			c.addUnknown(path+"."+key, "key", key, known)
		}
	}
	if given, ok := fields["id"]; ok {
		c.readID(a, given, path+".id")
	}
	if given, ok := fields["when"]; ok {
		a.when = c.expression(given, path+".when")
	}
	given, ok := fields["saveAs"]
	switch name, isText := given.(string); {
	case !ok:
	case !a.saves():
		c.add(path+".saveAs", "%s has no result to save", a.Type)
	case !isText:
		c.add(path+".saveAs", "must be the name of a variable")
	default:
		c.variable(path+".saveAs", name)
		a.saveAs = name
	}
}

func (c *compiler) readID(a *action, given any, path string) {
	id, _ := given.(string)
	if !idRegexp.MatchString(id) {
		c.add(path, "must begin with a letter and have 1 to 64 of the characters a-z A-Z 0-9 _ -")
		return
	}
	if first, taken := c.ids[id]; taken {
		c.add(path, "%q is the id of %s already", id, first)
		return
	}
	if c.ids != nil {
		c.ids[id] = strings.TrimSuffix(path, ".id")
	}
	a.key = id
}

func (c *compiler) expression(given any, path string) *expression {
	switch truth, isBool := given.(bool); {
	case isBool && truth:
		given = "true"
	case isBool:
		given = "false"
	}
	text, ok := given.(string)
	if !ok {
		c.add(path, "must be an expression, such as testScore >= 70")
		return nil
	}
	e, err := compileExpression(text)
	if err != nil {
		c.add(path, "%s", err)
	}
	return e
}

// parameters compiles the parameters of an action, and reports unknown, missing and contradictory ones.
func (c *compiler) parameters(a *action, given map[string]any, path string, depth int) {
	for _, name := range slices.Sorted(maps.Keys(given)) {
		p, known := a.parameter(name)
		switch {
		case known && given[name] == nil && p.kind != valueKind:
			c.add(path+"."+name, "is empty; write a value, or leave it out")
		case known:
			c.parameter(a, p, given[name], path+"."+name, depth)
		case a.Waits != "" && slices.Contains(timeoutKeys, name):
		case slices.Contains(timeoutKeys, name):
			c.add(path+"."+name, "%s does not wait and has no %s", a.Type, name)
		default:
			names := a.names()
			if a.Waits != "" {
				names = append(names, timeoutKeys...)
			}
			c.addUnknown(path+"."+name, "parameter", name, names)
		}
	}
	for _, p := range a.Parameters {
		if _, is := given[p.Name]; p.Required && !is {
			c.add(path+"."+p.Name, "is missing: %s", p.About)
		}
	}
	for _, group := range a.OneOf {
		if n := countPresent(given, group); n != 1 {
			c.add(path, "give exactly one of %s", joinNames(group))
		}
	}
	for _, group := range a.AnyOf {
		if countPresent(given, group) == 0 {
			c.add(path, "give at least one of %s", joinNames(group))
		}
	}
	if channel, _ := given["channel"].(string); channel != "" && channel != channelWebhook && given["target"] != nil {
		c.add(path+".target", "only channel webhook has a target")
	}
}

func countPresent(given map[string]any, group []string) int {
	n := 0
	for _, name := range group {
		if _, is := given[name]; is {
			n++
		}
	}
	return n
}

// timeouts reads an action's timeout keys. Each key stands beside the parameters or among them, but not in both places.
func (c *compiler) timeouts(a *action, fields, parameters map[string]any, path string, depth int) {
	if a.Waits == "" {
		return
	}
	for _, key := range timeoutKeys {
		at := path + "." + key
		value, given := fields[key]
		if nested, also := parameters[key]; also {
			if given {
				c.add(at, "is given twice, also among the parameters")
				continue
			}
			at, value, given = path+".parameters."+key, nested, true
		}
		if !given {
			continue
		}
		switch key {
		case "timeout":
			a.timeout = c.timeout(value, a.Waits, at)
		case "onTimeout":
			a.onTimeout = c.oneOf(value, reactionKind, at)
		case "timeoutActions":
			a.timeoutActions = c.actions(value, at, depth+1)
		}
	}
}

func (c *compiler) timeout(given any, kind, path string) time.Duration {
	text, _ := given.(string)
	d, err := parseDuration(text)
	_, longest := executions.Limits(kind)
	switch {
	case text == "":
		c.add(path, "must be a duration, such as 30s, 90m, 24h or 7d")
	case err != nil:
		c.add(path, "%s", err)
	case d <= 0 || d > longest:
		c.add(path, "%s is not allowed: a wait for %s lasts more than 0 and at most %s", text, kind, formatDuration(longest))
	}
	return d
}

func (c *compiler) oneOf(given any, kind paramKind, path string) string {
	word, _ := given.(string)
	if !slices.Contains(kind.choices(), word) {
		c.addUnknown(path, "value", fmt.Sprint(given), kind.choices())
	}
	return word
}

// parameter compiles one parameter by its kind: expressions and templates are parsed, nested actions compiled. Names of
// skills, agents and flows are recorded, and checked against the database later.
func (c *compiler) parameter(a *action, p Parameter, given any, path string, depth int) {
	switch p.kind {
	case exprKind:
		a.exprs[p.Name] = c.expression(given, path)
	case exprsKind:
		c.expressions(a, given, path)
	case actionsKind:
		a.nested[p.Name] = c.actions(given, path, depth+1)
	case casesKind:
		a.cases = c.cases(given, path, depth)
	case flowKind:
		name, ok := given.(string)
		if !ok || !flowReferenceRegexp.MatchString(name) {
			c.add(path, "must be the name of a flow")
		}
		a.flow, a.flowPath = name, path
	case skillKind:
		name, _ := given.(string)
		a.recordSkill(path, name)
		a.params[p.Name] = c.value(p.kind, given, path)
	case agentKind:
		name, _ := given.(string)
		a.agents = map[string]string{path: name}
		a.params[p.Name] = c.value(p.kind, given, path)
	case namesKind:
		list, _ := given.([]any)
		for i, item := range list {
			name, _ := item.(string)
			a.recordSkill(fmt.Sprintf("%s[%d]", path, i), name)
		}
		a.params[p.Name] = c.value(p.kind, given, path)
	case timeoutKind, reactionKind: // read by timeouts
	default:
		a.params[p.Name] = c.value(p.kind, given, path)
	}
}

// recordSkill records a reference to a skill.
func (a *action) recordSkill(path, skill string) {
	if a.skills == nil {
		a.skills = map[string]string{}
	}
	a.skills[path] = skill
}

// value reads a parameter's value and parses its templates.
func (c *compiler) value(kind paramKind, given any, path string) any {
	text, isText := given.(string)
	switch kind {
	case textKind, durationKind, timeKind:
		if !isText || text == "" {
			c.add(path, "must be a text")
		}
		c.checkTime(kind, text, path)
	case textsKind:
		c.checkTexts(given, path)
		if isText {
			given = []any{given}
		}
	case objectKind, setKind:
		names, ok := given.(map[string]any)
		if !ok {
			c.add(path, "must be a mapping of names to values")
		}
		for name := range names {
			if kind == setKind {
				c.variable(path+"."+name, name)
			}
		}
	case listKind:
		if _, isList := given.([]any); !isList && (!isText || !isSingleReference(text)) {
			c.add(path, "must be a list, or a template that is one: {{documents}}")
		}
	case boolKind:
		if _, ok := given.(bool); !ok {
			c.add(path, "must be true or false")
		}
	case countKind:
		if n, err := normalize(given); err != nil || !isCount(n) {
			c.add(path, "must be a whole number from 1 to %d", maxIterations)
		}
	case nameKind:
		c.variable(path, text)
	case skillKind:
		if !skillRegexp.MatchString(text) {
			c.add(path, "must be the name of a skill")
		}
	case agentKind:
		if !agentRegexp.MatchString(text) {
			c.add(path, "must be the name of an agent")
		}
	case namesKind:
		c.checkSkillNames(given, path)
	case channelKind, failureKind, statusKind:
		c.oneOf(given, kind, path)
	default: // any value, or read elsewhere
	}
	normalized, err := normalize(given)
	if err != nil {
		c.add(path, "%s", err)
	}
	return parseTree(normalized, path, func(path string, err error) { c.add(path, "%s", err) })
}

// checkTime validates a duration or a time that is not a template.
func (c *compiler) checkTime(kind paramKind, text, path string) {
	if t, err := parseTemplate(text); t != nil || err != nil || text == "" {
		return // reported elsewhere, or known only at run time
	}
	if kind == durationKind {
		if _, err := validateDelay(text); err != nil {
			c.add(path, "%s", err)
		}
	}
	if kind == timeKind {
		if _, err := time.Parse(time.RFC3339, text); err != nil {
			c.add(path, "%q is not a time: write 2026-01-31T09:00:00Z", text)
		}
	}
}

func isSingleReference(text string) bool {
	t, err := parseTemplate(text)
	return err == nil && t != nil && t.isSingleReference()
}

func isCount(value any) bool {
	n, ok := value.(int)
	return ok && n >= 1 && n <= maxIterations
}

func (c *compiler) checkTexts(given any, path string) {
	list, isList := given.([]any)
	text, isText := given.(string)
	switch {
	case isText && text != "":
	case !isList || len(list) == 0:
		c.add(path, "must be a text, or a list of texts")
	}
	for i, item := range list {
		if text, ok := item.(string); !ok || text == "" {
			c.add(fmt.Sprintf("%s[%d]", path, i), "must be a text")
		}
	}
}

func (c *compiler) checkSkillNames(given any, path string) {
	list, ok := given.([]any)
	if !ok {
		c.add(path, "must be a list of names of skills")
	}
	for i, item := range list {
		if name, _ := item.(string); !skillRegexp.MatchString(name) {
			c.add(fmt.Sprintf("%s[%d]", path, i), "must be the name of a skill")
		}
	}
}

func (c *compiler) expressions(a *action, given any, path string) {
	all, ok := given.(map[string]any)
	if !ok {
		c.add(path, "must be a mapping of names to expressions")
	}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		c.variable(path+"."+name, name)
		if e := c.expression(all[name], path+"."+name); e != nil {
			a.exprs[name] = e
		}
	}
}

// cases reads the cases of a switch.
func (c *compiler) cases(given any, path string, depth int) []branch {
	list, ok := given.([]any)
	if !ok || len(list) == 0 {
		c.add(path, "must be a list of {condition, actions} or {equals, actions}")
		return nil
	}
	all := make([]branch, 0, len(list))
	for i, item := range list {
		at := fmt.Sprintf("%s[%d]", path, i)
		fields, ok := item.(map[string]any)
		if !ok {
			c.add(at, "must be {condition, actions} or {equals, actions}")
			continue
		}
		all = append(all, c.switchCase(fields, at, depth))
	}
	return all
}

// switchCase compiles a case of a switch: its condition, or the value that it equals, and its actions.
func (c *compiler) switchCase(fields map[string]any, path string, depth int) branch {
	keys := []string{"condition", "equals", "actions"}
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(keys, key) {
			c.addUnknown(path+"."+key, "key", key, keys)
		}
	}
	b := branch{}
	condition, decides := fields["condition"]
	equals, compares := fields["equals"]
	switch {
	case decides == compares:
		c.add(path, "give exactly one of condition, equals")
	case decides:
		b.condition = c.expression(condition, path+".condition")
	default:
		b.equals = c.value(valueKind, equals, path+".equals")
	}
	if fields["actions"] == nil {
		c.add(path+".actions", "is missing: give the actions to run")
		return b
	}
	b.actions = c.actions(fields["actions"], path+".actions", depth+1)
	return b
}
