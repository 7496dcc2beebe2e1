package models_test

import (
	"context"
	"fmt"

	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/offline"
)

func Example() {
	url, stop, err := offline.Start(context.Background())
	if err != nil {
		fmt.Println(err)
		return
	}
	defer stop()
	client, err := models.New(models.Config{BaseURL: url, Model: offline.Model})
	if err != nil {
		fmt.Println(err)
		return
	}
	resp, err := client.Complete(context.Background(), models.Request{
		Messages: []models.Message{{Role: models.RoleUser, Content: "How large are the tables?"}},
		Tools: []models.Tool{{
			Name:        "table_sizes",
			Description: "List tables by size",
			Parameters: map[string]any{
				"type":       "object",
				"properties": map[string]any{"limit": map[string]any{"type": "integer", "default": 5}},
				"required":   []string{"limit"},
			},
		}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	call := resp.Message.ToolCalls[0]
	fmt.Println(resp.FinishReason, call.Name, call.Arguments, resp.Priced, resp.CostUSD)
	// Output: tool_calls table_sizes {"limit":5} true 0
}
