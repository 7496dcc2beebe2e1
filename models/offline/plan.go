package offline

import (
	"cmp"
	"encoding/json"
	"slices"
	"strings"
)

const (
	atOnce   = 4  // looks in one reply
	inAll    = 10 // looks in one turn
	reports  = 6  // bookkeeping calls in one reply
	relative = 4  // a tool is close enough with one relative-th of the closest one's words
)

// decision is either calls or a text.
type decision struct {
	calls []call
	text  string
}

// decide applies the rules of the package comment, in their order.
func decide(s situation) decision {
	rules := []func(situation) []call{forced, orders, nextLooks, proofs, bookkeeping}
	want, inWords := s.wish()
	if inWords {
		rules = []func(situation) []call{forced, func(situation) []call { return want.calls }}
	}
	for _, rule := range rules {
		calls := slices.DeleteFunc(rule(s), s.repeated)
		if s.oneAtime && len(calls) > 1 {
			calls = calls[:1]
		}
		if len(calls) > 0 {
			return decision{calls: calls}
		}
	}
	if want.text != "" && !s.structured() {
		return decision{text: want.text}
	}
	return decision{text: s.answer()}
}

// forced is what tool_choice demands: a certain tool, or any at all as long as none was called.
func forced(s situation) []call {
	if s.forced == "" || s.forced == "none" || len(s.made) > 0 {
		return nil
	}
	if t, offered := s.tool(s.forced); offered {
		c, _ := s.fill(t)
		return []call{c}
	}
	if s.forced != "*" || len(s.tools) == 0 || len(orders(s)) > 0 || len(nextLooks(s)) > 0 {
		return nil
	}
	for _, t := range s.tools {
		if !t.changes() {
			c, _ := s.fill(t)
			return []call{c}
		}
	}
	return nil
}

// nextLooks are the next few of the relevant tools. Those that need an invented name come last, and only
// where nothing else has been found.
func nextLooks(s situation) []call {
	room := min(atOnce, inAll-len(s.looks()))
	var sure, unsure []call
	for _, t := range s.relevant() {
		if s.has(t.name) {
			continue
		}
		if c, known := s.fill(t); known {
			sure = append(sure, c)
		} else {
			unsure = append(unsure, c)
		}
	}
	if len(sure) == 0 && len(s.made) == 0 {
		sure = unsure
	}
	if len(sure) == 0 && len(s.looks()) == 0 {
		return s.searched()
	}
	return sure[:max(0, min(room, len(sure)))]
}

// relevant are the looking tools that have to do with the prompt, or best with one of its open steps, the closest first.
func (s situation) relevant() []tool {
	type scored struct {
		tool
		score int
	}
	subject := words(s.topic)
	var all []scored
	best := 0
	for _, t := range s.tools {
		if !t.isLook() {
			continue
		}
		score := t.closeness(subject)
		best = max(best, score)
		all = append(all, scored{t, score})
	}
	wanted := map[string]bool{}
	for _, step := range s.steps {
		if !step.open || len(all) == 0 {
			continue
		}
		title := words(step.title)
		closest := slices.MaxFunc(all, func(a, b scored) int {
			return cmp.Or(cmp.Compare(a.closeness(title), b.closeness(title)), cmp.Compare(b.name, a.name))
		})
		wanted[closest.name] = wanted[closest.name] || closest.closeness(title) > 0
	}
	all = slices.DeleteFunc(all, func(t scored) bool {
		return !wanted[t.name] && (t.score == 0 || t.score*relative < best)
	})
	slices.SortFunc(all, func(a, b scored) int {
		return cmp.Or(cmp.Compare(b.score, a.score), cmp.Compare(a.name, b.name))
	})
	chosen := make([]tool, 0, len(all))
	for _, t := range all {
		chosen = append(chosen, t.tool)
	}
	return chosen
}

// searched looks for tools that were not offered at once, where none of those offered has to do with the message.
func (s situation) searched() []call {
	t, offered := s.tool("skill_search")
	subject := firstWords(s.topic)
	if !offered || len(subject) == 0 || s.has(t.name) {
		return nil
	}
	c, ok := s.fillWith(t, map[string]any{"query": strings.Join(subject, " ")})
	if !ok {
		return nil
	}
	return []call{c}
}

// encoded makes the call of a tool.
func encoded(name string, arguments any) call {
	text, err := json.Marshal(arguments)
	if err != nil {
		text = []byte("{}") // only what came out of JSON goes in
	}
	return call{name: name, arguments: string(text)}
}
