package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/requests"
)

func (c *cli) requestsCommand() *cobra.Command {
	return group("requests", "List and answer requests to people: documents, signatures, tests",
		c.requestsListCommand(), c.requestsShowCommand(), c.requestsAnswerCommand())
}

func (c *cli) requestsListCommand() *cobra.Command {
	var f requests.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List requests, newest first", Args: positionalArgs(0, 0, "no arguments"),
		Long: `List requests to people, newest first. agent requests answer ID answers one. Over HTTP the request id is the
event's key: POST /v1/events {"event": "SIGNATURE_COMPLETED", "key": "ID", "data": {"url": "https://…"}}`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			page, next, err := readPage(cmd.Context(), s, requests.List, &f, &f.Limit,
				func(r requests.Record) string { return r.ID })
			if err != nil {
				return err
			}
			return printRows(c, page, next, "no requests",
				[]string{"REQUEST", "KIND", "STATUS", "ASKED", "THREAD", "ABOUT"}, func(r requests.Record) []string {
					about := r.Title
					if len(r.Items) > 0 {
						about += fmt.Sprintf(" (%d of %d: %s)", len(r.Received), len(r.Items), strings.Join(r.Items, ", "))
					}
					return []string{r.ID, r.Kind, r.Status, formatTime(r.CreatedAt), postgres.Deref(r.ThreadID), truncate(about, 60)}
				})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state", "pending", "completed", "closed")
	enumFlag(cmd.Flags(), &f.Kind, "kind", "only this kind", requests.Document, requests.Signature, requests.Test)
	cmd.Flags().StringVar(&f.ThreadID, "thread", "", "only this thread")
	executionFlag(cmd.Flags(), &f.ExecutionID)
	cursorFlag(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 50)
	return cmd
}

func (c *cli) requestsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one request: details, answers, waiting execution",
		Args: rowID("a request", "agent requests ls"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			r, err := readRequest(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			return c.print(r, func(w io.Writer) { writeRequest(w, r) })
		}),
	}
}

func readRequest(ctx context.Context, s *session, id string) (requests.Record, error) {
	r, err := requests.Get(ctx, s.Pool, id)
	if errors.Is(err, requests.ErrNotFound) {
		err = hint(err, "see agent requests ls")
	}
	return r, err
}

func writeRequest(w io.Writer, r requests.Record) {
	lines := [][2]string{
		{"kind", r.Kind},
		{"status", r.Status},
		{"title", r.Title},
		{"asked", formatTime(r.CreatedAt)},
		{"execution", r.ExecutionID},
		{"trace", r.TraceID + " (agent trace " + r.TraceID + ")"},
		{"thread", postgres.Deref(r.ThreadID)},
	}
	for _, item := range r.Items {
		came, received := r.Received[item]
		if !received {
			came = "missing"
		}
		lines = append(lines, [2]string{"document", item + ": " + came})
	}
	if text := string(r.Details); text != "{}" && text != "" {
		lines = append(lines, [2]string{"details", text})
	}
	if len(r.Answer) > 0 && string(r.Answer) != "null" {
		lines = append(lines, [2]string{"answer", string(r.Answer)})
	}
	if r.CompletedAt != nil {
		lines = append(lines, [2]string{r.Status, formatTime(*r.CompletedAt)})
	}
	if r.Status == requests.Pending {
		lines = append(lines, [2]string{"answer it", answerCommand(r)})
	}
	fmt.Fprintf(w, "request %s\n", r.ID)
	for _, l := range lines {
		fmt.Fprintf(w, "  %-10s %s\n", l[0], printable(l[1]))
	}
}

// answerCommand returns the command line that answers a request.
func answerCommand(r requests.Record) string {
	command := "agent requests answer " + r.ID
	switch r.Kind {
	case requests.Document:
		var flags strings.Builder
		for _, item := range missingDocuments(r) {
			flags.WriteString(" --document " + shellWord(item+"=URL"))
		}
		return command + flags.String()
	case requests.Signature:
		return command + " --yes --url URL"
	}
	return command + " --yes, --no or --text RESULT, and --score NUMBER"
}

func missingDocuments(r requests.Record) []string {
	var missing []string
	for _, item := range r.Items {
		if _, came := r.Received[item]; !came {
			missing = append(missing, item)
		}
	}
	return missing
}

// requestAnswer holds the flags of agent requests answer.
type requestAnswer struct {
	yes, no   bool
	text, url string
	score     float64
	documents []string // NAME=URL
	setFlags  []string // names of the flags that are set
}

func (c *cli) requestsAnswerCommand() *cobra.Command {
	var a requestAnswer
	cmd := &cobra.Command{
		Use: "answer ID", Short: "Answer a request on a person's behalf; its execution resumes",
		Args: rowID("a request", "agent requests ls"),
		Long: `Answer a request on a person's behalf. It raises the same event as POST /v1/events, with the same audit
record. A test takes one of --yes (passed), --no (failed) and --text RESULT, and --score. A signature takes --yes, and
--url of the signed document; to refuse it, cancel the waiting execution. A document request takes --document NAME=URL,
repeatable; it is complete when all documents are there.`,
		Example: "  agent requests answer 0198… --no --score 41\n" +
			"  agent requests answer 0198… --yes --url https://…/signed.pdf\n" +
			"  agent requests answer 0198… --document cv=https://…/cv.pdf --document photo=https://…/photo.jpg",
		RunE: func(cmd *cobra.Command, args []string) error {
			cmd.Flags().Visit(func(f *pflag.Flag) {
				if cmd.InheritedFlags().Lookup(f.Name) == nil {
					a.setFlags = append(a.setFlags, f.Name)
				}
			})
			if a.yes && a.no || (a.yes || a.no) && a.text != "" {
				return usageError("--yes, --no and --text exclude each other")
			}
			return c.withPromptSession(func(cmd *cobra.Command, args []string, s *session) error {
				return c.answerRequest(cmd, s, args[0], a)
			})(cmd, args)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&a.yes, "yes", false, "signed; passed")
	f.BoolVar(&a.no, "no", false, "failed")
	f.StringVar(&a.text, "text", "", "the result of a test")
	f.Float64Var(&a.score, "score", 0, "the score of a test")
	f.StringVar(&a.url, "url", "", "the URL of the signed document")
	f.StringArrayVar(&a.documents, "document", nil, "a requested document: NAME=URL, or NAME=ID of a stored one; "+
		"repeatable")
	return cmd
}

// answerRequest raises the event that answers a request. If another answer ended the request first, it raises nothing
// and returns an error.
func (c *cli) answerRequest(cmd *cobra.Command, s *session, id string, a requestAnswer) error {
	r, err := readRequest(cmd.Context(), s, id)
	if err != nil {
		return err
	}
	over := func(status string) error {
		return hint(fmt.Errorf("request %s is already %s", r.ID, status), "see agent requests show %s", r.ID)
	}
	if r.Status != requests.Pending {
		return over(r.Status)
	}
	event, data, err := a.event(r)
	if err != nil {
		return err
	}
	text, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	delivered, err := c.raiseEvent(cmd.Context(), s, event, r.ID, text, "", func(tx pgx.Tx, event string) error {
		status, err := requests.OverBefore(cmd.Context(), tx, r.ID, event)
		if err == nil && status != "" {
			err = over(status)
		}
		return err
	})
	if err != nil {
		return err
	}
	if r, err = readRequest(cmd.Context(), s, id); err != nil {
		return err
	}
	result := map[string]any{
		"event_id": delivered.EventID, "resumed": append([]string{}, delivered.Resumed...), "request": r,
	}
	return c.print(result, func(w io.Writer) {
		parts := []string{r.Status + " " + r.ID}
		if missing := missingDocuments(r); len(missing) > 0 {
			parts = append(parts, "still missing: "+strings.Join(missing, ", "))
		}
		if len(delivered.Resumed) > 0 {
			parts = append(parts, "resumed "+strings.Join(delivered.Resumed, ", "))
		}
		fmt.Fprintln(w, printable(strings.Join(parts, "; ")))
	})
}

// event returns the event that answers a kind of request.
func (a requestAnswer) event(r requests.Record) (name string, data map[string]any, err error) {
	switch r.Kind {
	case requests.Document:
		if !a.hasOnly("document") {
			return "", nil, usageError("a document request takes only --document NAME=URL; NAME is one of: %s",
				strings.Join(r.Items, ", "))
		}
		documents, err := a.documentList(r)
		return "DOCUMENT_UPLOADED", map[string]any{"documents": documents}, err
	case requests.Signature:
		if !a.hasOnly("yes", "url") || !a.yes {
			return "", nil, usageError("a signature request takes --yes, and --url; to refuse it, cancel the waiting "+
				"execution: agent executions cancel %s", r.ExecutionID)
		}
		return "SIGNATURE_COMPLETED", a.signature(), nil
	default:
		if !a.hasOnly("yes", "no", "text", "score") {
			return "", nil, usageError("a test request takes --yes, --no or --text RESULT, and --score")
		}
		if math.IsNaN(a.score) || math.IsInf(a.score, 0) {
			return "", nil, usageError("--score %g is not a finite number", a.score)
		}
		return "TEST_COMPLETED", a.result(), nil
	}
}

// hasOnly reports whether flags were set and all of them are among names.
func (a requestAnswer) hasOnly(names ...string) bool {
	return len(a.setFlags) > 0 &&
		!slices.ContainsFunc(a.setFlags, func(given string) bool { return !slices.Contains(names, given) })
}

var documentID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// documentList parses the --document flags.
func (a requestAnswer) documentList(r requests.Record) ([]map[string]string, error) {
	var all []map[string]string
	for _, given := range a.documents {
		at := slices.IndexFunc(r.Items, func(item string) bool { return strings.HasPrefix(given, item+"=") })
		if at < 0 {
			return nil, usageError("--document %.200q is not NAME=URL with a requested NAME: %s", given,
				strings.Join(r.Items, ", "))
		}
		where := given[len(r.Items[at])+1:]
		if documentID.MatchString(where) {
			all = append(all, map[string]string{"document": r.Items[at], "document_id": where})
			continue
		}
		if u, err := url.Parse(where); err != nil || u.Scheme == "" || u.Host == "" {
			return nil, usageError("--document %.200q has no URL or document id; store a file with agent documents add", given)
		}
		all = append(all, map[string]string{"document": r.Items[at], "url": where})
	}
	return all, nil
}

func (a requestAnswer) signature() map[string]any {
	data := map[string]any{"signed_at": time.Now().UTC().Format(time.RFC3339)}
	if a.url != "" {
		data["url"] = a.url
	}
	return data
}

func (a requestAnswer) result() map[string]any {
	data := map[string]any{}
	switch {
	case a.text != "":
		data["result"] = a.text
	case a.yes:
		data["result"] = "passed"
	case a.no:
		data["result"] = "failed"
	}
	if slices.Contains(a.setFlags, "score") {
		data["score"] = a.score
	}
	return data
}
