package workspace_test

import (
	"fmt"
	"os"
	"testing/fstest"

	"github.com/lanekeeper/lanekeeper/workspace"
)

func ExampleLoad() {
	_, err := workspace.Load(fstest.MapFS{"skills/ping.yaml": {Data: []byte(`
kind: skill
name: ping
handlr: http:https://example.com/ping
---
kind: automation
name: ping
cron: 0 6 * * *
skill: ping
max_attempts: many
`)}})
	fmt.Println(err)
	// Output:
	// skills/ping.yaml:4:1: unknown key "handlr"; did you mean "handler"?
	// skills/ping.yaml:10:15: max_attempts: is "many"; it must be a whole number
}

func ExampleDiff_WriteText() {
	diff := workspace.Diff{Items: []workspace.Item{
		{Kind: "skill", Name: "ping", Action: workspace.Create},
		{Kind: "automation", Name: "ping", Action: workspace.Update, Changes: []workspace.Change{
			{Field: "cron", Old: []byte(`"0 6 * * *"`), New: []byte(`"0 7 * * *"`)},
		}},
	}}
	if err := diff.WriteText(os.Stdout); err != nil {
		fmt.Println(err)
	}
	// Output:
	// + skill ping
	// ~ automation ping
	//     cron: "0 6 * * *" → "0 7 * * *"
	// 1 to create, 1 to update, 0 to remove, 0 unchanged
}
