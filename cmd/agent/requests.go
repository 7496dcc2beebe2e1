package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/lanekeeper/lanekeeper/requests"
)

func (c *cli) requestsCommand() *cobra.Command {
	return group("requests", "See and answer what was asked of people: documents, signatures, tests",
		c.requestsListCommand(), c.requestsShowCommand(), c.requestsAnswerCommand())
}

func (c *cli) requestsListCommand() *cobra.Command {
	var f requests.Filter
	cmd := &cobra.Command{
		Use: "ls", Short: "List requests, newest first", Args: args(0, 0, "no arguments"),
		Long: `List what was asked of people, newest first. agent requests answer ID answers one. Over HTTP the id
is the key of the event that answers it: POST /v1/events {"event": "SIGNATURE_COMPLETED", "key": "ID", "data": {"url": "https://…"}}`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			limit := f.Limit
			f.Limit = limit + 1
			all, err := requests.List(cmd.Context(), s.pool, f)
			if err != nil {
				return err
			}
			got, next := firstPage(all, limit, func(r requests.Record) string { return r.ID })
			return c.print(listing(got, next), func(w io.Writer) error {
				rows := make([][]string, len(got))
				for i, r := range got {
					about := r.Title
					if len(r.Items) > 0 {
						about += fmt.Sprintf(" (%d of %d: %s)", len(r.Received), len(r.Items), strings.Join(r.Items, ", "))
					}
					rows[i] = []string{r.ID, r.Kind, r.Status, when(r.CreatedAt), deref(r.ThreadID), clipped(about, 60)}
				}
				return table(w, "nothing was asked of anybody", []string{"REQUEST", "KIND", "STATUS", "ASKED", "THREAD", "ABOUT"}, rows)
			})
		}),
	}
	statusFlag(cmd.Flags(), &f.Status, "only this state", "pending", "completed", "closed")
	wordFlag(cmd.Flags(), &f.Kind, "kind", "only this kind", requests.Document, requests.Signature, requests.Test)
	cmd.Flags().StringVar(&f.ThreadID, "thread", "", "only of this thread")
	executionFlag(cmd.Flags(), &f.ExecutionID)
	executionCursor(cmd.Flags(), &f.Before)
	limitFlag(cmd.Flags(), &f.Limit, 50)
	return cmd
}

func (c *cli) requestsShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show one request: what was asked, what has come, which execution waits",
		Args: rowID("a request", "agent requests ls"),
		RunE: c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
			r, err := readRequest(cmd.Context(), s, args[0])
			if err != nil {
				return err
			}
			return c.print(r, func(w io.Writer) error { return writeRequest(w, r) })
		}),
	}
}

// readRequest reads a request by its id.
func readRequest(ctx context.Context, s *session, id string) (requests.Record, error) {
	r, err := requests.Get(ctx, s.pool, id)
	if errors.Is(err, requests.ErrNotFound) {
		err = hint(err, "see agent requests ls")
	}
	return r, err
}

// writeRequest shows a request for people.
func writeRequest(w io.Writer, r requests.Record) error {
	lines := [][2]string{
		{"kind", r.Kind},
		{"status", r.Status},
		{"title", r.Title},
		{"asked", when(r.CreatedAt)},
		{"execution", r.ExecutionID},
		{"trace", r.TraceID + " (agent trace " + r.TraceID + ")"},
		{"thread", deref(r.ThreadID)},
	}
	for _, item := range r.Items {
		came, there := r.Received[item]
		if !there {
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
		lines = append(lines, [2]string{r.Status, when(*r.CompletedAt)})
	}
	if r.Status == requests.Pending {
		lines = append(lines, [2]string{"answer it", answerCommand(r)})
	}
	fmt.Fprintf(w, "request %s\n", r.ID)
	for _, l := range lines {
		fmt.Fprintf(w, "  %-10s %s\n", l[0], printable(l[1]))
	}
	return nil
}

// answerCommand is the command that answers a request.
func answerCommand(r requests.Record) string {
	command := "agent requests answer " + r.ID
	switch r.Kind {
	case requests.Document:
		var flags strings.Builder
		for _, item := range missingDocuments(r) {
			flags.WriteString(" --document '" + item + "=URL'")
		}
		return command + flags.String()
	case requests.Signature:
		return command + " --yes --url URL"
	}
	return command + " --yes, --no or --text RESULT, and --score NUMBER"
}

// missingDocuments are the documents that were asked for and have not come.
func missingDocuments(r requests.Record) []string {
	var missing []string
	for _, item := range r.Items {
		if _, came := r.Received[item]; !came {
			missing = append(missing, item)
		}
	}
	return missing
}

// requestAnswer is what the flags of an answer say.
type requestAnswer struct {
	yes, no   bool
	text, url string
	score     float64
	documents []string // NAME=URL
	given     []string // the names of the flags
}

func (c *cli) requestsAnswerCommand() *cobra.Command {
	var a requestAnswer
	cmd := &cobra.Command{
		Use: "answer ID", Short: "Answer a request for the person it was asked of; the execution that waits goes on",
		Args: rowID("a request", "agent requests ls"),
		Long: `Answer a request for the person it was asked of. It raises the event that POST /v1/events raises, with the same audit record.

A test takes one of --yes (passed), --no (failed) and --text RESULT, and --score. A signature takes --yes, and --url of what was signed;
to refuse one, cancel the execution that waits. A request for documents takes --document NAME=URL for one or several of them; it is
completed when all are there.`,
		Example: "  agent requests answer 0198… --no --score 41\n" +
			"  agent requests answer 0198… --yes --url https://…/signed.pdf\n" +
			"  agent requests answer 0198… --document cv=https://…/cv.pdf --document photo=https://…/photo.jpg",
		RunE: func(cmd *cobra.Command, args []string) error {
			cmd.Flags().Visit(func(f *pflag.Flag) {
				if cmd.InheritedFlags().Lookup(f.Name) == nil {
					a.given = append(a.given, f.Name)
				}
			})
			if a.yes && a.no || (a.yes || a.no) && a.text != "" {
				return usageError("--yes, --no and --text exclude each other")
			}
			return c.withSession(func(cmd *cobra.Command, args []string, s *session) error {
				return c.answerRequest(cmd, s, args[0], a)
			})(cmd, args)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&a.yes, "yes", false, "signed; passed")
	f.BoolVar(&a.no, "no", false, "failed")
	f.StringVar(&a.text, "text", "", "the result of a test")
	f.Float64Var(&a.score, "score", 0, "the score of a test")
	f.StringVar(&a.url, "url", "", "where the signed document is")
	f.StringArrayVar(&a.documents, "document", nil, "a document that was asked for and where it is: NAME=URL, or NAME=ID of a stored one")
	return cmd
}

// answerRequest raises the event that answers a request.
func (c *cli) answerRequest(cmd *cobra.Command, s *session, id string, a requestAnswer) error {
	r, err := readRequest(cmd.Context(), s, id)
	if err != nil {
		return err
	}
	if r.Status != requests.Pending {
		return hint(fmt.Errorf("request %s is %s already", r.ID, r.Status), "see agent requests show %s", r.ID)
	}
	event, data, err := a.event(r)
	if err != nil {
		return err
	}
	text, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("encode answer: %w", err)
	}
	got, err := c.raiseEvent(cmd.Context(), s, event, r.ID, text, "")
	if err != nil {
		return err
	}
	if r, err = readRequest(cmd.Context(), s, id); err != nil {
		return err
	}
	result := map[string]any{"event_id": got.EventID, "resumed": append([]string{}, got.Resumed...), "request": r}
	return c.print(result, func(w io.Writer) error {
		said := []string{r.Status + " " + r.ID}
		if missing := missingDocuments(r); len(missing) > 0 {
			said = append(said, "still missing: "+strings.Join(missing, ", "))
		}
		if len(got.Resumed) > 0 {
			said = append(said, "resumed "+strings.Join(got.Resumed, ", "))
		}
		_, err := fmt.Fprintln(w, printable(strings.Join(said, "; ")))
		return err
	})
}

// event is the event that answers a request of a kind, and its data.
func (a requestAnswer) event(r requests.Record) (name string, data map[string]any, err error) {
	switch r.Kind {
	case requests.Document:
		if !a.only("document") {
			return "", nil, usageError("a request for documents takes --document NAME=URL and nothing else; NAME is one of: %s",
				strings.Join(r.Items, ", "))
		}
		documents, err := a.received(r)
		return "DOCUMENT_UPLOADED", map[string]any{"documents": documents}, err
	case requests.Signature:
		if !a.only("yes", "url") || !a.yes {
			return "", nil, usageError("a request for a signature takes --yes, and --url; to refuse it, cancel the execution "+
				"that waits: agent executions cancel %s", r.ExecutionID)
		}
		return "SIGNATURE_COMPLETED", a.signature(), nil
	default:
		if !a.only("yes", "no", "text", "score") {
			return "", nil, usageError("a request for a test takes --yes, --no or --text RESULT, and --score")
		}
		return "TEST_COMPLETED", a.result(), nil
	}
}

// only reports whether there are flags, and all of them are of the names.
func (a requestAnswer) only(names ...string) bool {
	return len(a.given) > 0 && !slices.ContainsFunc(a.given, func(given string) bool { return !slices.Contains(names, given) })
}

// documentID matches the id of a stored document.
var documentID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// received are the documents of the flags.
func (a requestAnswer) received(r requests.Record) ([]map[string]string, error) {
	var all []map[string]string
	for _, given := range a.documents {
		at := slices.IndexFunc(r.Items, func(item string) bool { return strings.HasPrefix(given, item+"=") })
		if at < 0 {
			return nil, usageError("--document %.200q is not NAME=URL with a NAME that was asked for: %s", given, strings.Join(r.Items, ", "))
		}
		where := given[len(r.Items[at])+1:]
		if documentID.MatchString(where) {
			all = append(all, map[string]string{"document": r.Items[at], "document_id": where})
			continue
		}
		if u, err := url.Parse(where); err != nil || u.Scheme == "" || u.Host == "" {
			return nil, usageError("--document %.200q has neither a URL nor the id of a document; store a file with agent documents add", given)
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

// result is the result of a test.
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
	if slices.Contains(a.given, "score") {
		data["score"] = a.score
	}
	return data
}
