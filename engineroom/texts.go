package engineroom

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

// read loads the part for its viewers. Package activity decides which texts to hide from viewers without the scope.
func (p part) read(ctx context.Context, req *pageRequest) (any, error) {
	if !req.mayReadThreads {
		ctx = activity.WithoutTexts(ctx)
	}
	return p.load(ctx, req)
}

// hidesTextsOf reports whether ctx hides the texts of an execution.
func (room *Room) hidesTextsOf(ctx context.Context, id string) (bool, error) {
	if !activity.HidesTexts(ctx) {
		return false, nil
	}
	var flow, surface string
	var thread *string
	err := room.Read.QueryRow(ctx, `select e.flow, e.surface, e.thread_id from agent_executions e where e.id = @id`,
		postgres.Strict{"id": id}).Scan(&flow, &surface, &thread)
	if errors.Is(err, pgx.ErrNoRows) {
		return true, nil
	}
	if err != nil {
		return true, fmt.Errorf("read whether the execution has texts: %w", err)
	}
	return activity.IsConversation(flow, surface, thread), nil
}

// hideJSON replaces JSON and its size by the note, if hide is set.
func hideJSON(hide bool, text *string, size *int64) {
	if hide {
		*text = string(activity.HiddenJSON(json.RawMessage(*text)))
		*size = int64(len(*text))
	}
}

// hideResult replaces the result of an execution by the note, if ctx hides its texts.
func hideResult(ctx context.Context, result *string, flow, surface string, thread *string) {
	if *result != "" && activity.HidesTexts(ctx) && activity.IsConversation(flow, surface, thread) {
		*result = activity.HiddenText
	}
}
