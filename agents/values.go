package agents

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Value is an effective value of an agent, with its source.
type Value struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	From  string `json:"from"` // document, the name of a setting, or default
}

// Sources of a value, beside the names of settings.
const (
	fromDocument = "document"
	fromDefault  = "default"
)

// Values lists the effective values of an agent in the order of its document. For the instructions it returns their
// length.
func (a Agent) Values() []Value {
	d := a.declared
	v := &values{}
	v.add("name", a.Name, a.Declared(), "AGENT_NAME")
	v.add("description", a.Description, d.Description != "", "")
	v.add("instructions", size(a.Instructions), d.Instructions != "", "")
	v.add("model", a.Model, d.Model != "", "AGENT_MODEL")
	v.add("fallback", list(a.Fallback), len(d.Fallback) > 0, "")
	v.add("effort", a.Effort, d.Effort != "", "AGENT_REASONING_EFFORT")
	v.add("temperature", number(a.Temperature), d.Temperature != nil, "")
	v.add("skills", a.skills(), d.Skills != nil, "")
	v.add("memory", a.Memory, d.Memory != "", "")
	v.add("pinned", list(a.Pinned), len(d.Pinned) > 0, "")
	v.add("delegates", list(a.Delegates), len(d.Delegates) > 0, "")
	v.add("keys", a.keys(), len(d.Keys) > 0, "")
	v.add("languages", list(a.Languages), len(d.Languages) > 0, "")
	v.add("timezone", a.Timezone, d.Timezone != "", "AGENT_TIMEZONE")
	v.add("greeting", a.Greeting, d.Greeting != "", "")
	v.limits(a.Limits, d.Limits)
	if h := a.Heartbeat; h != nil {
		v.add("heartbeat.cron", h.Cron, d.Heartbeat != nil && d.Heartbeat.Cron != "", "AGENT_HEARTBEAT_CRON")
		v.add("heartbeat.prompt", h.Prompt, h.Prompt != "", "")
	} else {
		v.add("heartbeat", "", false, "")
	}
	return v.list
}

type values struct{ list []Value }

// add adds a value. An empty value is shown as none.
func (v *values) add(name, value string, declared bool, setting string) {
	from := fromDefault
	switch {
	case declared:
		from = fromDocument
	case setting != "" && value != "":
		from = setting
	}
	value = cmp.Or(value, "none")
	v.list = append(v.list, Value{Name: name, Value: value, From: from})
}

func (v *values) limits(effective, declared Limits) {
	for _, limit := range []struct {
		name, setting       string
		effective, declared float64
	}{
		{"iterations", "AGENT_MAX_ITERATIONS", float64(effective.Iterations), float64(declared.Iterations)},
		{"tokens", "AGENT_MAX_TOKENS", float64(effective.Tokens), float64(declared.Tokens)},
		{"cost_usd", "AGENT_MAX_COST_USD", effective.CostUSD, declared.CostUSD},
		{"day_usd", "AGENT_BUDGET_DAY_USD", effective.DayUSD, declared.DayUSD},
	} {
		value := ""
		if limit.effective > 0 {
			value = strconv.FormatFloat(limit.effective, 'f', -1, 64)
		}
		v.add("limits."+limit.name, value, limit.declared > 0 && limit.declared == limit.effective, limit.setting)
	}
}

func (a Agent) skills() string {
	if a.Skills == nil {
		return "all that their scopes allow"
	}
	return list(a.Skills)
}

func (a Agent) keys() string {
	if len(a.Keys) == 0 && a.Default {
		return "all that no agent names"
	}
	return list(a.Keys)
}

func list(values []string) string { return strings.Join(values, ", ") }

func number(n *float64) string {
	if n == nil {
		return ""
	}
	return fmt.Sprintf("%g", *n)
}

func size(text string) string {
	if text == "" {
		return ""
	}
	return fmt.Sprintf("%d bytes", len(text))
}
