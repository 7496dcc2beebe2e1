package flows_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/flows"
)

// row is an action as the page has it.
func row(a flows.Action) string {
	var given []string
	for _, p := range a.Parameters {
		name := "`" + p.Name + "`"
		if !p.Required {
			name = "[" + name + "]"
		}
		given = append(given, name+" "+p.About)
	}
	about := a.About
	if a.Waits != "" {
		about += " Waits for " + a.Waits + "."
	}
	return "| `" + a.Type + "` | " + strings.Join(given, "; ") + " | " + about + " |"
}

// The page says what the code does: its table is that of Actions, its YAML is valid, its Go is the example.
func TestThePageIsTrue(t *testing.T) {
	t.Parallel()
	page := file(t, "../docs/flows.md")
	for _, a := range flows.Actions() {
		if !strings.Contains(page, row(a)+"\n") {
			t.Errorf("docs/flows.md has not this row:\n%s", row(a))
		}
	}
	yaml := regexp.MustCompile("(?s)```yaml\nkind: flow\n(.*?)```").FindStringSubmatch(page)
	if yaml == nil {
		t.Fatal("docs/flows.md shows no flow")
	}
	if err := flows.Validate(read(t, yaml[1])); err != nil {
		t.Errorf("docs/flows.md: %v", err)
	}
	code := file(t, "example_test.go")
	from, to := strings.Index(code, "// Onboard is"), strings.Index(code, "// Evaluate is")
	if shown := "```go\n" + strings.TrimSpace(code[from:to]) + "\n```"; !strings.Contains(page, shown) {
		t.Errorf("docs/flows.md does not show the example:\n%s", shown)
	}
}

func file(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
