package browser

import (
	_ "embed"
	"fmt"
	"strings"
)

// axeScript is axe-core, unchanged; its licence is beside it.
//
//go:embed axe/axe.min.js
var axeScript string

// Inaccessible lists axe-core's findings against WCAG 2.0 to 2.2, levels A and AA, on the present page: a line for each
// rule, with the elements. It omits findings that axe-core cannot decide.
func (p *Page) Inaccessible() []string {
	p.tb.Helper()
	var violations []struct {
		ID    string `json:"id"`
		Help  string `json:"help"`
		Nodes []struct {
			HTML    string `json:"html"`
			Summary string `json:"failureSummary"`
		} `json:"nodes"`
	}
	var loaded bool
	p.Eval(`Boolean(window.axe)`, &loaded)
	script := axeScript + ";"
	if loaded {
		script = ""
	}
	p.Eval(script+
		`axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"], resultTypes: ["violations"]})
		.then(r => r.violations.map(v => ({id: v.id, help: v.help, nodes: v.nodes.slice(0, 5).map(n => ({html: n.html.slice(0, 300), failureSummary: n.failureSummary}))})))`, &violations)
	list := make([]string, 0, len(violations))
	for _, rule := range violations {
		var nodes strings.Builder
		for _, n := range rule.Nodes {
			fmt.Fprintf(&nodes, "\n    %s\n      %s", n.HTML, strings.ReplaceAll(n.Summary, "\n", "\n      "))
		}
		list = append(list, fmt.Sprintf("%s: %s%s", rule.ID, rule.Help, nodes.String()))
	}
	return list
}
