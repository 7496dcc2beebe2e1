package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/memory"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/modelcheck"
	"github.com/lanekeeper/lanekeeper/models/offline"
)

func (c *cli) modelsCommand() *cobra.Command {
	return group("models", "See the models that agents use, and check that they work",
		c.modelsListCommand(), c.modelsCheckCommand())
}

func (c *cli) modelsCheckCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "check [MODEL]",
		Short: "Make real calls of a model, and say which setting helps where one fails",
		Long: `Make real calls of a model: a turn, a tool, a correction, a stream, a bounded answer, an image. Without MODEL, of
each model that agents use, fallbacks included. The provider bills the calls; their number is said before.
Exit code 1 when a check fails.`,
		Args: oneModel,
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
			if err := c.print(listing(checked, ""), work); err != nil {
				return err
			}
			if slices.ContainsFunc(checked, checkedModel.failed) {
				return &exitError{exitFailed, nil}
			}
			return nil
		},
	}
}

// oneModel lets a command take a model, or none.
func oneModel(cmd *cobra.Command, got []string) error {
	if len(got) == 1 && strings.TrimSpace(got[0]) == "" {
		return &exitError{exitUsage, seeHelp(errors.New("the model's name is empty"), cmd)}
	}
	return args(0, 1, "at most one model's name")(cmd, got)
}

// modelsToCheck is the client, and the models that are named or used.
func (c *cli) modelsToCheck(ctx context.Context, named []string) (*models.Client, []modelcheck.Target, func(), error) {
	c.calm()
	cfg, log, err := c.settings()
	if err != nil {
		return nil, nil, nil, err
	}
	client, _, stop, err := newModel(ctx, cfg, log, models.Retry{Attempts: 2})
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

// targetsOf are models without an agent.
func targetsOf(named []string) (targets []modelcheck.Target) {
	for _, name := range named {
		targets = append(targets, modelcheck.Target{Model: name})
	}
	return targets
}

// agentsInService reads the agents.
func (c *cli) agentsInService(ctx context.Context) ([]agents.Agent, error) {
	s, err := c.session(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close(ctx)
	return directory(s.config).List(ctx, s.pool)
}

// usedModel is a model, and the agents that use it.
type usedModel struct {
	modelcheck.Target
	Agents []string `json:"agents"`
}

// usedModels are the models of agents, each once with the same effort, in the order of the agents.
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

// checkedModel is what the checks of a model found.
type checkedModel struct {
	modelcheck.Target
	Checks  []modelcheck.Result `json:"checks"`
	Calls   int                 `json:"calls"`
	CostUSD float64             `json:"cost_usd"`
}

func (m checkedModel) failed() bool {
	return slices.ContainsFunc(m.Checks, func(r modelcheck.Result) bool { return r.Status == modelcheck.Fail })
}

// checkModels makes the checks, and writes each result when it is there.
func (c *cli) checkModels(
	ctx context.Context, client *models.Client, targets []modelcheck.Target, w io.Writer,
) (all []checkedModel, err error) {
	calls := 0
	for _, t := range targets {
		calls += modelcheck.Calls(client, t)
	}
	c.say("%d calls of %d %s, which the provider bills; each part of the protocol that it refuses adds one",
		calls, len(targets), plural("model", len(targets)))
	for i, t := range targets {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintln(w, printable(t.String()))
		found := checkedModel{Target: t}
		err := modelcheck.Run(ctx, client, t, c.transient, func(r modelcheck.Result) {
			c.transient("")
			found.Checks = append(found.Checks, r)
			found.Calls += r.Calls
			found.CostUSD += r.CostUSD
			writeCheck(w, r)
		})
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(w, "%d calls, %s\n", found.Calls, money(found.CostUSD))
		all = append(all, found)
	}
	return all, nil
}

// transient shows on a terminal what is waited for, until the next thing is said.
func (c *cli) transient(what string) {
	if !terminal(c.err) {
		return
	}
	if what == "" {
		fmt.Fprint(c.err, "\r\x1b[K")
		return
	}
	fmt.Fprintf(c.err, "\r\x1b[K…        %s", what)
}

// writeCheck writes a result as a line, and the setting that helps as another.
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

// listedModel is a model in a listing.
type listedModel struct {
	Model   string     `json:"model"`
	Listed  bool       `json:"listed"` // by the server
	Agents  []string   `json:"agents"`
	Context int        `json:"context,omitempty"` // tokens; 0 when nobody says
	Images  bool       `json:"images"`            // images are sent to it
	API     models.API `json:"api"`
	Price   *usd       `json:"usd_per_million,omitempty"`
}

// usd is a price as AGENT_PRICES has it.
type usd struct {
	Input  float64 `json:"input"`
	Cached float64 `json:"cached"`
	Output float64 `json:"output"`
}

func (c *cli) modelsListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Short: "List the models that the server offers and those that agents use",
		Args: args(0, 0, "no arguments"),
		Long: `List the models that the server offers (GET /models) and those that agents use, those first. No call costs
anything. What is known of a model is from the server, AGENT_PRICES and a built-in table.`,
		RunE: c.withSession(func(cmd *cobra.Command, _ []string, s *session) error {
			ctx := cmd.Context()
			client, _, stop, err := newModel(ctx, s.config, s.log, models.Retry{Attempts: 1})
			if err != nil {
				return err
			}
			defer stop()
			all, err := directory(s.config).List(ctx, s.pool)
			if err != nil {
				return err
			}
			asking, cancel := context.WithTimeout(ctx, 20*time.Second)
			defer cancel()
			offered, unlisted := client.List(asking)
			if unlisted != nil {
				c.say("the server lists no models: %s", printable(unlisted.Error()))
			}
			listed := listModels(client, usedModels(client, all), offered)
			return c.print(listing(listed, ""), func(w io.Writer) error { return writeModels(w, listed) })
		}),
	}
}

// listModels joins what agents use and what the server offers.
func listModels(client *models.Client, used []usedModel, offered []models.Listed) []listedModel {
	var all []listedModel
	add := func(model string) *listedModel {
		i := slices.IndexFunc(all, func(m listedModel) bool { return m.Model == model })
		if i >= 0 {
			return &all[i]
		}
		all = append(all, listedModel{
			Model: model, Agents: []string{}, Context: models.FactsOf(model).Context,
			Images: client.TakesImages(model), API: client.API(model),
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

func writeModels(w io.Writer, listed []listedModel) error {
	rows := make([][]string, len(listed))
	for i, m := range listed {
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
		rows[i] = row
	}
	return table(w, "", []string{"MODEL", "LISTED", "AGENTS", "CONTEXT", "IMAGES", "API", "USD PER MILLION"}, rows)
}

// newModel makes the client of the configured model. Where none is configured, it starts the offline
// one, a server on the loopback interface that speaks the same protocol; stop ends it.
func newModel(ctx context.Context, cfg config.Config, log *slog.Logger, retry models.Retry) (client *models.Client, about string, stop func(), err error) {
	set := models.Config{
		BaseURL: cfg.OpenAIBaseURL, APIKey: cfg.OpenAIKey.Reveal(), Model: cfg.Model, Prices: prices(cfg), Logger: log, Retry: retry,
		ReasoningEffort: cfg.Provider.Effort, API: models.API(cfg.Provider.API), Headers: cfg.Provider.Headers,
		Query: query(cfg.Provider.Query), Extra: cfg.Provider.Extra,
	}
	stop = func() {}
	about = "at " + cfg.OpenAIBaseURL
	switch {
	case cfg.OpenAIBaseURL == "" && !cfg.OpenAIKey.IsSet():
		set.BaseURL, stop, err = offline.Start(ctx)
		if err != nil {
			return nil, "", nil, fmt.Errorf("start the offline model: %w", err)
		}
		set.Model, about = offline.Model, "rule-based, built in (set OPENAI_API_KEY or OPENAI_BASE_URL, and AGENT_MODEL, for a real one)"
	case cfg.OpenAIBaseURL == "":
		about = "OpenAI"
	}
	if set.Model == "" {
		set.Model = assumedModel
		log.WarnContext(ctx, "AGENT_MODEL is not set, a model is assumed; set it to one of your provider's", "model", set.Model)
	}
	client, err = models.New(set)
	if err != nil {
		stop()
		return nil, "", nil, &exitError{exitUsage, err}
	}
	return client, fmt.Sprintf("%s, %s", set.Model, about), stop, nil
}

// assumedModel is asked where AGENT_MODEL names none.
const assumedModel = "gpt-4o-mini"

// query is parameters in the form of a URL's.
func query(values map[string]string) url.Values {
	q := url.Values{}
	for name, value := range values {
		q.Set(name, value)
	}
	return q
}

// prices is the price table: the built-in one, and what AGENT_PRICES says instead.
func prices(cfg config.Config) models.Prices {
	own := models.Prices{}
	for model, p := range cfg.Prices {
		own[model] = models.Price{
			Prompt: p.Input, Cached: cmp.Or(p.Cached, p.Input), CacheWrite: p.CacheWrite, Completion: p.Output,
			Long: models.Long{
				Over: p.Long.Over, Prompt: p.Long.Input, Cached: cmp.Or(p.Long.Cached, p.Long.Input), CacheWrite: p.Long.CacheWrite,
				Completion: p.Long.Output,
			},
		}
	}
	return models.DefaultPrices().With(own)
}

// newIndex makes the search of memories by meaning; nil where no embedding model is configured. Key, headers and query
// of the chat model go to its own server only.
func newIndex(cfg config.Config, log *slog.Logger) (*memory.Index, error) {
	set := models.Config{
		BaseURL: cfg.Embedding.BaseURL, APIKey: cfg.Embedding.Key.Reveal(), Model: cfg.Embedding.Model, Logger: log,
	}
	switch {
	case set.Model == "":
		return nil, nil
	case set.BaseURL == "":
		set.BaseURL = cfg.OpenAIBaseURL
		set.APIKey = cmp.Or(set.APIKey, cfg.OpenAIKey.Reveal())
		set.Headers, set.Query = cfg.Provider.Headers, query(cfg.Provider.Query)
	}
	client, err := models.New(set)
	if err != nil {
		return nil, &exitError{exitUsage, fmt.Errorf("AGENT_EMBEDDING_MODEL: %w", err)}
	}
	return memory.NewIndex(client, log), nil
}

// examineEmbedding says whether memories are found by meaning, and what helps where they are not.
func examineEmbedding(ctx context.Context, s *session, add func(string, error, string) bool) {
	const check = "embeddings"
	index, err := newIndex(s.config, s.log)
	if err != nil || index == nil {
		add(check, err, "off: memories are found by words alone; AGENT_EMBEDDING_MODEL turns them on")
		return
	}
	state, err := index.State(ctx, s.pool)
	if err == nil && state.Extension == "" {
		err = withoutExtension(s.config.Embedding.Model, state)
	}
	if err != nil {
		add(check, err, "")
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	dimensions, err := index.Check(ctx)
	if err != nil {
		err = fmt.Errorf("memories are found by words alone: %w", err)
	}
	add(check, err, fmt.Sprintf("%s, %d dimensions, pgvector %s; %d of %d memories are embedded",
		s.config.Embedding.Model, dimensions, state.Extension, state.Embedded, state.Entries))
}

// withoutExtension says how the database gets the extension vector.
func withoutExtension(model string, state memory.EmbeddingState) error {
	wrong := fmt.Sprintf("%s is set, and memories are found by words alone: the database has no extension vector (pgvector)", model)
	if state.Available {
		return hint(errors.New(wrong), "run in it as a superuser: create extension vector;")
	}
	return hint(errors.New(wrong), "install pgvector on its server (a package such as postgresql-%d-pgvector), then run in the database as a superuser: create extension vector;",
		state.Server)
}
