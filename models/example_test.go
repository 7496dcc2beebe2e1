package models_test

import (
	"context"
	"fmt"

	openai "github.com/sashabaranov/go-openai"

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
		Messages: []openai.ChatCompletionMessage{{Role: openai.ChatMessageRoleUser, Content: "How large are the tables?"}},
		Tools: []openai.Tool{{
			Type: openai.ToolTypeFunction,
			Function: &openai.FunctionDefinition{
				Name:        "table_sizes",
				Description: "List tables by size",
				Parameters: map[string]any{
					"type":       "object",
					"properties": map[string]any{"limit": map[string]any{"type": "integer", "default": 5}},
					"required":   []string{"limit"},
				},
			},
		}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	call := resp.Message.ToolCalls[0].Function
	fmt.Println(resp.FinishReason, call.Name, call.Arguments, resp.Priced, resp.CostUSD)
	// Output: tool_calls table_sizes {"limit":5} true 0
}
