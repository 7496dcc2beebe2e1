package checks_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
)

// metrics returns the names of the agent's metrics.
func metrics(t *testing.T) map[string]bool {
	t.Helper()
	files, err := filepath.Glob("../../internal/telemetry/*.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d files: %v", len(files), err)
	}
	names := map[string]bool{"up": true}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, found := range regexp.MustCompile(`"(agent_[a-z_]+)"`).FindAllStringSubmatch(string(text), -1) {
			names[found[1]] = true
		}
	}
	return names
}

// checkQuery parses a query like Prometheus, and checks that the agent has its metrics.
func checkQuery(t *testing.T, at, query string, known map[string]bool) {
	t.Helper()
	tree, err := parser.ParseExpr(query)
	if err != nil {
		t.Errorf("%s: %v in %s", at, err, query)
		return
	}
	parser.Inspect(tree, func(node parser.Node, _ []parser.Node) error {
		if selector, is := node.(*parser.VectorSelector); is && !known[strings.TrimSuffix(selector.Name, "_bucket")] {
			t.Errorf("%s: the agent has no metric %s", at, selector.Name)
		}
		return nil
	})
}

func TestPrometheusReadsTheAlerts(t *testing.T) {
	groups, problems := rulefmt.ParseFile("../monitoring/alerts.yaml", false, model.UTF8Validation)
	if len(problems) > 0 {
		t.Fatal(problems)
	}
	known, rules := metrics(t), 0
	for _, group := range groups.Groups {
		for _, rule := range group.Rules {
			rules++
			checkQuery(t, rule.Alert, rule.Expr, known)
			if rule.Labels["severity"] == "" || rule.Annotations["summary"] == "" {
				t.Errorf("%s has no severity or no summary", rule.Alert)
			}
		}
	}
	if rules < 8 {
		t.Errorf("%d rules", rules)
	}
}

func TestTheDashboardAsksForMetricsOfTheAgent(t *testing.T) {
	text, err := os.ReadFile("../monitoring/grafana.json")
	if err != nil {
		t.Fatal(err)
	}
	type box struct{ X, Y, W, H int }
	var board struct {
		Title, UID string
		Panels     []struct {
			ID         int
			Title      string
			Datasource struct{ UID string }
			GridPos    box
			Targets    []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil || board.UID == "" || len(board.Panels) < 10 {
		t.Fatalf("%q with %d panels: %v", board.UID, len(board.Panels), err)
	}
	known, seen, cells := metrics(t), map[int]bool{}, map[[2]int]string{}
	variables := strings.NewReplacer("$__rate_interval", "5m", "$job", "lanekeeper")
	for _, panel := range board.Panels {
		if seen[panel.ID] || panel.Title == "" || panel.Datasource.UID != "${datasource}" || len(panel.Targets) == 0 {
			t.Errorf("panel %d %q is incomplete, or its id is another's", panel.ID, panel.Title)
		}
		seen[panel.ID] = true
		for x := panel.GridPos.X; x < panel.GridPos.X+panel.GridPos.W; x++ {
			for y := panel.GridPos.Y; y < panel.GridPos.Y+panel.GridPos.H; y++ {
				if other := cells[[2]int{x, y}]; other != "" || x >= 24 {
					t.Errorf("%q is over %q, or too wide", panel.Title, other)
				}
				cells[[2]int{x, y}] = panel.Title
			}
		}
		for _, target := range panel.Targets {
			checkQuery(t, panel.Title, variables.Replace(target.Expr), known)
		}
	}
}
