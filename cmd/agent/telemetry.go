package main

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/config"
	"github.com/lanekeeper/lanekeeper/internal/telemetry"
)

// observe makes the metrics of the process, and what sends its traces where the environment names a receiver.
func (c *cli) observe(a *app) error {
	settings, err := telemetry.Load(c.environ)
	if err != nil {
		return &exitError{exitUsage, &config.Error{Problems: strings.Split(err.Error(), "\n")}}
	}
	if settings.Endpoint != "" { // what the SDK has to say, such as that a receiver did not take all of a batch
		otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { a.log.Warn("OpenTelemetry", "error", err) }))
	}
	a.metrics = telemetry.NewMetrics(buildVersion(), telemetry.NewState(a.pool, a.log))
	a.exporter = telemetry.NewExporter(a.pool, settings, buildVersion(), a.metrics, a.log)
	return nil
}

// metricsEndpoints is what Prometheus scrapes. Like the probes it asks for no token: it has counts, and names of surfaces, skills,
// models and webhook endpoints, and nothing of what was said.
func (a *app) metricsEndpoints() []api.Endpoint {
	return []api.Endpoint{{
		Method: "GET", Path: "/metrics", Access: api.Public, ContentType: "text/plain",
		About:   "Counters of this process and gauges of the database, for Prometheus. Answers also when the database is away.",
		Handler: a.metrics.Handler(),
	}}
}

// keepLinks is how long it is kept who asked for a trace. A link is needed until the trace has ended.
const keepLinks = 60 * 24 * time.Hour

// forgetLinks takes away links of traces that ended long ago.
func (a *app) forgetLinks(ctx context.Context) {
	if _, err := activity.ForgetLinks(ctx, a.pool, keepLinks); err != nil && ctx.Err() == nil {
		a.log.WarnContext(ctx, "old links of traces not forgotten", "error", err)
	}
}
