package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/lanekeeper/lanekeeper/agents"
	"github.com/lanekeeper/lanekeeper/internal/app"
	"github.com/lanekeeper/lanekeeper/models"
	"github.com/lanekeeper/lanekeeper/models/modelcheck"
)

func (c *cli) modelsCommand() *cobra.Command {
	return group("models", "List the agents' models and check them", c.modelsListCommand(), c.modelsCheckCommand())
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
		Long: `List the models of the agents, then those of the server (GET /models). Nothing is billed. Facts come from the
server, AGENT_PRICES and a built-in table.`,
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
