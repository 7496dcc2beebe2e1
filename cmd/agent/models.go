package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/internal/human"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/modelcheck"
)

func (c *cli) modelsCommand() *cobra.Command {
	return group("models", "List the agents' models and check them", c.modelsListCommand(), c.modelsCheckCommand())
}

func (c *cli) modelsCheckCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check [MODEL]",
		Short: "Test a model with real calls and suggest settings",
		Long: `Test a model with real calls: a turn, a tool, a correction, a stream, a bounded answer, an image. Without MODEL it tests
each model of the agents, fallbacks included. The provider bills the calls; the command prints their number first.
The exit code is 1 when a check fails.`,
		Args: modelArg,
		RunE: func(cmd *cobra.Command, args []string) error {
			client, targets, stop, err := c.modelsToCheck(cmd.Context(), args)
			if err != nil {
				return err
			}
			defer stop()
			var checked []checkedModel
			work := func(w io.Writer) error {
				checked, err = c.checkModels(cmd.Context(), client, targets, w)
				return err
			}
			if c.json {
				if err := work(io.Discard); err != nil {
					return err
				}
			}
			if err := c.tryPrint(pageOf(checked, ""), work); err != nil {
				return err
			}
			if slices.ContainsFunc(checked, checkedModel.failed) {
				return &exitError{exitFailed, nil}
			}
			return nil
		},
	}
}

// modelArg accepts at most one model name.
func modelArg(cmd *cobra.Command, got []string) error {
	if len(got) == 1 && strings.TrimSpace(got[0]) == "" {
		return &exitError{exitUsage, helpHint(errors.New("the model's name is empty"), cmd)}
	}
	return positionalArgs(0, 1, "at most one model's name")(cmd, got)
}

// modelsToCheck returns the client and the named models, or those that agents use.
func (c *cli) modelsToCheck(ctx context.Context, named []string) (*models.Client, []modelcheck.Target, func(), error) {
	c.quietLogs()
	cfg, log, err := c.settings()
	if err != nil {
		return nil, nil, nil, err
	}
	client, _, stop, err := app.NewModel(ctx, cfg, log, models.Retry{Attempts: 2})
	if err != nil || len(named) > 0 {
		return client, targetsOf(named), stop, err
	}
	all, err := c.agentsInService(ctx)
	if err != nil {
		stop()
		return nil, nil, nil, err
	}
	var targets []modelcheck.Target
	for _, u := range usedModels(client, all) {
		targets = append(targets, u.Target)
	}
	return client, targets, stop, nil
}

func targetsOf(named []string) (targets []modelcheck.Target) {
	for _, name := range named {
		targets = append(targets, modelcheck.Target{Model: name})
	}
	return targets
}

func (c *cli) agentsInService(ctx context.Context) ([]agents.Agent, error) {
	s, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close(ctx)
	return app.NewDirectory(s.config).List(ctx, s.Pool)
}

type usedModel struct {
	modelcheck.Target
	Agents []string `json:"agents"`
}

// usedModels lists each model and effort once, in the order of the agents.
func usedModels(client *models.Client, all []agents.Agent) (used []usedModel) {
	for _, a := range all {
		for _, name := range append([]string{a.Model}, a.Fallback...) {
			t := modelcheck.Target{Model: cmp.Or(name, client.Model()), Effort: a.Effort}
			i := slices.IndexFunc(used, func(u usedModel) bool { return u.Target == t })
			if i < 0 {
				i = len(used)
				used = append(used, usedModel{Target: t})
			}
			if !slices.Contains(used[i].Agents, a.Name) {
				used[i].Agents = append(used[i].Agents, a.Name)
			}
		}
	}
	return used
}

type checkedModel struct {
	modelcheck.Target
	Checks  []modelcheck.Result `json:"checks"`
	Calls   int                 `json:"calls"`
	CostUSD float64             `json:"cost_usd"`
}

func (m checkedModel) failed() bool {
	return slices.ContainsFunc(m.Checks, func(r modelcheck.Result) bool { return r.Status == modelcheck.Fail })
}

// checkModels runs the checks and prints each result as it arrives.
func (c *cli) checkModels(
	ctx context.Context, client *models.Client, targets []modelcheck.Target, w io.Writer,
) (all []checkedModel, err error) {
	calls := 0
	for _, t := range targets {
		calls += modelcheck.Calls(client, t)
	}
	c.infof("%d calls to %d %s, billed by the provider; each rejected protocol feature adds one",
		calls, len(targets), plural("model", len(targets)))
	for i, t := range targets {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, printable(t.String()))
		found := checkedModel{Target: t}
		err := modelcheck.Run(ctx, client, t, c.showProgress, func(r modelcheck.Result) {
			c.showProgress("")
			found.Checks = append(found.Checks, r)
			found.Calls += r.Calls
			found.CostUSD += r.CostUSD
			writeCheck(w, r)
		})
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(w, "%d calls, %s\n", found.Calls, human.Money(found.CostUSD))
		all = append(all, found)
	}
	return all, nil
}

// showProgress shows the current check on a terminal, until the next output.
func (c *cli) showProgress(what string) {
	if !terminal(c.err) {
		return
	}
	if what == "" {
		fmt.Fprint(c.err, "\r\x1b[K")
		return
	}
	fmt.Fprintf(c.err, "\r\x1b[K…        %s", what)
}

// writeCheck prints a result and the setting that helps.
func writeCheck(w io.Writer, r modelcheck.Result) {
	took, word := "", string(r.Status)
	if r.Status == modelcheck.Fail {
		word = "FAIL"
	}
	if r.Calls > 0 {
		took = (time.Duration(r.Millis) * time.Millisecond).Round(10 * time.Millisecond).String()
	}
	line := fmt.Sprintf("%-7s  %-10s  %7s  %s", word, r.Check, took, printable(r.Detail))
	fmt.Fprintln(w, strings.TrimRight(line, " "))
	if r.Help != "" {
		fmt.Fprintf(w, "%30s%s\n", "", r.Help)
	}
}

type listedModel struct {
	Model   string     `json:"model"`
	Listed  bool       `json:"listed"` // by the server
	Agents  []string   `json:"agents"`
	Context int        `json:"context,omitempty"` // tokens; 0 if unknown
	Images  bool       `json:"images"`            // accepts images
	API     models.API `json:"api"`
	Price   *usd       `json:"usd_per_million,omitempty"`
}

// usd is a price in the format of AGENT_PRICES.
type usd struct {
	Input  float64 `json:"input"`
	Cached float64 `json:"cached"`
	Output float64 `json:"output"`
}

func (c *cli) modelsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the models of the server and of the agents",
		Args: positionalArgs(0, 0, "no arguments"),
		Long: `List the models of the agents, then those of the server (GET /models). Nothing is billed. Facts come from the server,
AGENT_PRICES and a built-in table.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			ctx := cmd.Context()
			client, _, stop, err := app.NewModel(ctx, s.config, s.log, models.Retry{Attempts: 1})
			if err != nil {
				return err
			}
			defer stop()
			all, err := app.NewDirectory(s.config).List(ctx, s.Pool)
			if err != nil {
				return err
			}
			asking, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			offered, unlisted := client.List(asking)
			if unlisted != nil {
				c.infof("the server lists no models: %s", printable(unlisted.Error()))
			}
			listed := listModels(client, usedModels(client, all), offered)
			return c.print(pageOf(listed, ""), func(w io.Writer) { writeModels(w, listed) })
		}),
	}
}

// listModels merges the models that agents use with those the server offers.
func listModels(client *models.Client, used []usedModel, offered []models.ListedModel) []listedModel {
	var all []listedModel
	add := func(model string) *listedModel {
		i := slices.IndexFunc(all, func(m listedModel) bool { return m.Model == model })
		if i >= 0 {
			return &all[i]
		}
		all = append(all, listedModel{
			Model: model, Agents: []string{}, Context: models.LookupModel(model).Context,
			Images: client.SupportsImages(model), API: client.API(model),
		})
		m := &all[len(all)-1]
		if p, known := client.Price(model); known {
			m.Price = &usd{p.Prompt, p.Cached, p.Completion}
		}
		return m
	}
	for _, u := range used {
		m := add(u.Model)
		m.Agents = append(m.Agents, u.Agents...)
	}
	for _, o := range offered {
		m := add(o.ID)
		m.Listed = true
		if o.Context > 0 {
			m.Context = o.Context
		}
		m.Images = m.Images && (o.Inputs == nil || slices.Contains(o.Inputs, "image"))
	}
	return all
}

func writeModels(w io.Writer, listed []listedModel) {
	writeRows(w, "",
		[]string{"MODEL", "LISTED", "AGENTS", "CONTEXT", "IMAGES", "API", "USD PER MILLION"}, listed,
		func(m listedModel) []string {
			row := []string{m.Model, "no", strings.Join(m.Agents, ", "), "unknown", "no", string(m.API), "unknown"}
			if m.Listed {
				row[1] = "yes"
			}
			if m.Context > 0 {
				row[3] = strconv.Itoa(m.Context)
			}
			if m.Images {
				row[4] = "yes"
			}
			if m.Price != nil {
				row[6] = fmt.Sprintf("%g / %g", m.Price.Input, m.Price.Output)
			}
			return row
		})
}

// diagnoseEmbedding checks semantic search of memories.
func diagnoseEmbedding(ctx context.Context, s *session, add func(string, error, string) bool) {
	const check = "embeddings"
	index, err := app.NewIndex(s.config, s.log)
	if err != nil || index == nil {
		add(check, err, "off: memory search matches words only; set AGENT_EMBEDDING_MODEL to enable them")
		return
	}
	state, err := index.State(ctx, s.Pool)
	if err == nil && state.Extension == "" {
		err = missingExtension(s.config.Embedding.Model, state)
	}
	if err != nil {
		add(check, err, "")
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	dimensions, err := index.Check(ctx)
	if err != nil {
		err = fmt.Errorf("memory search matches words only: %w", err)
	}
	add(check, err, fmt.Sprintf("%s, %d dimensions, pgvector %s; %d of %d memories are embedded",
		s.config.Embedding.Model, dimensions, state.Extension, state.Embedded, state.Entries))
}

// missingExtension explains how to install the extension vector.
func missingExtension(model string, state memory.EmbeddingState) error {
	wrong := fmt.Sprintf(
		"%s is set, but memory search matches words only: the database has no extension vector (pgvector)", model)
	if state.Available {
		return hint(errors.New(wrong), "run as a superuser: create extension vector;")
	}
	return hint(errors.New(wrong), "install pgvector on its server (a package such as postgresql-%d-pgvector), then run "+
		"in the database as a superuser: create extension vector;",
		state.Server)
}
