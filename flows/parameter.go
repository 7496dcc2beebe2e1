package flows

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// parameter reads one parameter that is given.
func (c *compiler) parameter(a *action, p Parameter, given any, path string, depth int) {
	switch p.sort {
	case exprSort:
		a.exprs[p.Name] = c.expression(given, path)
	case exprsSort:
		c.expressions(a, given, path)
	case actionsSort:
		a.nested[p.Name] = c.actions(given, path, depth+1)
	case casesSort:
		a.cases = c.cases(given, path, depth)
	case flowSort:
		name, ok := given.(string)
		if !ok || !flowReference.MatchString(name) {
			c.add(path, "must be the name of a flow")
		}
		a.flow, a.flowPath = name, path
	case skillSort:
		name, _ := given.(string)
		a.mentions(path, name)
		a.given[p.Name] = c.value(p.sort, given, path)
	case agentSort:
		name, _ := given.(string)
		a.agents = map[string]string{path: name}
		a.given[p.Name] = c.value(p.sort, given, path)
	case namesSort:
		list, _ := given.([]any)
		for i, item := range list {
			name, _ := item.(string)
			a.mentions(fmt.Sprintf("%s[%d]", path, i), name)
		}
		a.given[p.Name] = c.value(p.sort, given, path)
	case timeoutSort, reactionSort: // not parameters: see timeouts
	default:
		a.given[p.Name] = c.value(p.sort, given, path)
	}
}

// mentions notes a skill that the action names.
func (a *action) mentions(path, skill string) {
	if a.skills == nil {
		a.skills = map[string]string{}
	}
	a.skills[path] = skill
}

// value reads a parameter that is kept as a value, with its templates parsed.
func (c *compiler) value(s sort, given any, path string) any {
	text, isText := given.(string)
	switch s {
	case textSort, lengthSort, timeSort:
		if !isText || text == "" {
			c.add(path, "must be a text")
		}
		c.moment(s, text, path)
	case textsSort:
		c.texts(given, path)
		if isText {
			given = []any{given}
		}
	case objectSort, setSort:
		names, ok := given.(map[string]any)
		if !ok {
			c.add(path, "must be a mapping of names to values")
		}
		for name := range names {
			if s == setSort {
				c.variable(path+"."+name, name)
			}
		}
	case listSort:
		if _, isList := given.([]any); !isList && (!isText || !isWhole(text)) {
			c.add(path, "must be a list, or a template that is one: {{documents}}")
		}
	case boolSort:
		if _, ok := given.(bool); !ok {
			c.add(path, "must be true or false")
		}
	case countSort:
		if n, err := normal(given); err != nil || !isCount(n) {
			c.add(path, "must be a whole number from 1 to %d", maxTimes)
		}
	case nameSort:
		c.variable(path, text)
	case skillSort:
		if !skillForm.MatchString(text) {
			c.add(path, "must be the name of a skill")
		}
	case agentSort:
		if !agentForm.MatchString(text) {
			c.add(path, "must be the name of an agent")
		}
	case namesSort:
		c.skills(given, path)
	case channelSort, failureSort, statusSort:
		c.choice(given, s, path)
	default: // anything goes, or it is read elsewhere
	}
	settled, err := normal(given)
	if err != nil {
		c.add(path, "%s", err)
	}
	return parseTree(settled, path, func(path string, err error) { c.add(path, "%s", err) })
}

// moment checks a duration or a time that has no template.
func (c *compiler) moment(s sort, text, path string) {
	if t, err := parseTemplate(text); t != nil || err != nil || text == "" {
		return // said elsewhere, or known only when it runs
	}
	if s == lengthSort {
		if _, err := delayLength(text); err != nil {
			c.add(path, "%s", err)
		}
	}
	if s == timeSort {
		if _, err := time.Parse(time.RFC3339, text); err != nil {
			c.add(path, "%q is not a time: write 2026-01-31T09:00:00Z", text)
		}
	}
}

func isWhole(text string) bool {
	t, err := parseTemplate(text)
	return err == nil && t != nil && t.whole()
}

func isCount(value any) bool {
	n, ok := value.(int)
	return ok && n >= 1 && n <= maxTimes
}

func (c *compiler) texts(given any, path string) {
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

func (c *compiler) skills(given any, path string) {
	list, ok := given.([]any)
	if !ok {
		c.add(path, "must be a list of names of skills")
	}
	for i, item := range list {
		if name, _ := item.(string); !skillForm.MatchString(name) {
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

// cases reads those of a switch.
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
		all = append(all, c.oneCase(fields, at, depth))
	}
	return all
}

func (c *compiler) oneCase(fields map[string]any, path string, depth int) branch {
	keys := []string{"condition", "equals", "actions"}
	for _, key := range slices.Sorted(maps.Keys(fields)) {
		if !slices.Contains(keys, key) {
			c.unknown(path+"."+key, "key", key, keys)
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
		b.equals = c.value(valueSort, equals, path+".equals")
	}
	if fields["actions"] == nil {
		c.add(path+".actions", "is missing: what is run")
		return b
	}
	b.actions = c.actions(fields["actions"], path+".actions", depth+1)
	return b
}
