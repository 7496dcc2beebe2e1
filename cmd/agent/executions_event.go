package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/threads"
)

func (c *cli) executionsEventCommand() *cobra.Command {
	var data, id string
	events := []string{"MESSAGE_RECEIVED", "DOCUMENT_UPLOADED", "SIGNATURE_COMPLETED", "TEST_COMPLETED", "EVENT_COMPLETED"}
	cmd := &cobra.Command{
		Use: "event NAME KEY", Short: "Raise an event and resume its waiters",
		Args: positionalArgs(2, 2, "an event's name and its key"),
		Long: `Raise an event and resume every execution that waits for it. Without a waiter it is stored for the first one.
The key selects the wait: the thread for MESSAGE_RECEIVED; the request (agent requests ls) for DOCUMENT_UPLOADED,
SIGNATURE_COMPLETED and TEST_COMPLETED; the flow's key for EVENT_COMPLETED. The content of MESSAGE_RECEIVED is stored
in the thread, if there is one.`,
		Example: "  agent executions event EVENT_COMPLETED invoice-7 --data '{\"paid\": true}' --id bank-42\n" +
			"  agent executions event MESSAGE_RECEIVED ana --data '{\"content\": \"yes\"}'\n" +
			"  agent executions event DOCUMENT_UPLOADED 0198… --data '{\"document\": \"cv\", \"url\": \"https://…\"}'",
		RunE: func(cmd *cobra.Command, args []string) error {
			if !slices.Contains(events, args[0]) {
				return usageError("%q is no external event; use one of %s", args[0], strings.Join(events, ", "))
			}
			text, err := c.readJSON(data)
			if err != nil {
				return err
			}
			if args[1] == "" {
				return usageError("the key is empty; name the wait")
			}
			return c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
				delivered, err := c.raiseEvent(cmd.Context(), s, args[0], args[1], text, id, nil)
				if err != nil {
					return err
				}
				return c.printDelivered(delivered)
			})(cmd, args)
		},
	}
	cmd.Flags().StringVar(&data, "data", "{}", "the event's data: JSON, @file, or - for standard input")
	cmd.Flags().StringVar(&id, "id", "", "idempotency id: the event counts once")
	return cmd
}

// raiseEvent delivers an event and records its origin in one transaction, which check may still refuse.
func (c *cli) raiseEvent(
	ctx context.Context, s *session, event, key string, data json.RawMessage, id string,
	check func(tx pgx.Tx, event string) error,
) (delivered executions.Delivered, err error) {
	a, err := c.app(s, nil)
	if err != nil {
		return delivered, err
	}
	output := map[string]any{}
	what := fmt.Sprintf("the wait for %s %.300q", event, key)
	switch {
	case event == "MESSAGE_RECEIVED":
		what = fmt.Sprintf("thread %q, or the message id,", key)
	case id != "":
		what = fmt.Sprintf("event id %.300q", id)
	}
	raised := activity.Act{Name: "raise_event", Within: true, Input: map[string]any{"event": event, "key": key, "id": id}}
	err = new(postgres.KeyedTx).Try(ctx, what, func(ctx context.Context) error {
		_, err := activity.Record(ctx, s.Pool, raised, func(tx pgx.Tx, _ string) (_ any, err error) {
			delivered, err = threads.Deliver(ctx, a.Engine, tx, event, key, data, id)
			output["event_id"], output["resumed"] = delivered.EventID, delivered.Resumed
			if err == nil && check != nil {
				err = check(tx, delivered.EventID)
			}
			if err == nil {
				err = activity.RecordRequester(ctx, tx, "event "+delivered.EventID)
			}
			return output, err
		})
		return err
	})
	err = postgres.ExplainLock(ctx, s.Pool, err, what, "agent_events", "agent_executions", "agent_threads", "agent_locks")
	if postgres.IsCode(err, "22023", "22P02") || errors.Is(err, threads.ErrTooLong) {
		return delivered, &exitError{exitUsage, err}
	}
	return delivered, err
}

func (c *cli) printDelivered(delivered executions.Delivered) error {
	resumed := append([]string{}, delivered.Resumed...)
	return c.print(map[string]any{"event_id": delivered.EventID, "resumed": resumed}, func(w io.Writer) {
		if len(resumed) == 0 {
			fmt.Fprintf(w, "event %s: no waiter; stored for the first one\n", delivered.EventID)
			return
		}
		fmt.Fprintf(w, "event %s: resumed %s\n", delivered.EventID, strings.Join(resumed, ", "))
	})
}
