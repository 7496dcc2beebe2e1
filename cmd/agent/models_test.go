package main

import (
	"net/http"
	"strings"
	"testing"

	openai "github.com/sashabaranov/go-openai"

	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// twoAgents use three models, one of them twice.
const twoAgents = "kind: agent\nname: sales\ndefault: true\nmodel: gpt-6-luna\nfallback: [gpt-5-mini]\n---\n" +
	"kind: agent\nname: billing\nmodel: house/own\nfallback: [gpt-5-mini]\neffort: low\n"

func TestModelsOfAgentsAreChecked(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	server.Handle(modeltest.PassesChecks)
	url := pgtest.URL(t)
	p := on(t, url, "OPENAI_BASE_URL="+server.URL(), "AGENT_MODEL=gpt-4o")
	got := p.run("models", "check")
	contains(t, got.err, "7 calls of 1 model, which the provider bills")
	contains(t, got.out, "gpt-4o\n", "pass     answers", "pass     correction", "7 calls, $0.0")
	if got.code != 0 || len(server.Requests()) != 7 {
		t.Errorf("exit %d after %d requests", got.code, len(server.Requests()))
	}
	p.must("apply", folder(t, map[string]string{"a.yaml": twoAgents}))
	got = p.run("models", "check")
	contains(t, got.err, "28 calls of 4 models")
	contains(t, got.out, "gpt-6-luna\n", "gpt-5-mini\n", "house/own (effort low)\n", "gpt-5-mini (effort low)\n",
		"skipped  price", "set AGENT_PRICES")
	var rows int
	if err := connect(t, url).QueryRow(t.Context(), `select count(*) from agent_activity where skill_name = 'model_call'`).
		Scan(&rows); err != nil || rows != 0 {
		t.Errorf("%d rows of calls are in the log: %v", rows, err)
	}
}

func TestAModelThatFailsACheckIsExitCodeOne(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	server.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		if len(req.Tools) > 0 {
			return modeltest.Text("It is warm.")
		}
		return modeltest.PassesChecks(n, req)
	})
	p := bare(t, "OPENAI_BASE_URL="+server.URL(), "AGENT_LOG_LEVEL=warn")
	got := p.run("models", "check", "own/model") // no database is needed
	if got.code != 1 || strings.Contains(got.err, "agent:") {
		t.Errorf("exit %d, stderr %q", got.code, got.err)
	}
	contains(t, got.out, "FAIL     tools", "called no tool", "--enable-auto-tool-choice", "skipped  correction", "no tool was called")
	var all struct {
		Items []struct {
			Model  string
			Calls  int
			Checks []struct{ Check, Status, Detail, Help string }
		}
	}
	got = p.run("models", "check", "own/model", "--json")
	if err := oneDocument(got.out, &all); err != nil || got.code != 1 {
		t.Fatalf("exit %d, %v in %s", got.code, err, got.out)
	}
	if m := all.Items[0]; m.Model != "own/model" || m.Calls != 5 || len(m.Checks) != 8 || m.Checks[1].Status != "fail" {
		t.Errorf("got %+v", m)
	}
}

func TestModelsAreListedWithWhatIsKnown(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	p := on(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), `AGENT_PRICES={"house/own":{"input":1,"output":3}}`)
	p.must("apply", folder(t, map[string]string{"a.yaml": twoAgents}))
	contains(t, p.must("models", "ls"), "MODEL", "scripted    yes", "gpt-6-luna  no", "sales, billing", "400000", "1 / 3", "0.1 / 0.5")
	var all struct {
		Items []struct {
			Model  string
			Listed bool
			Agents []string
			Price  *struct{ Output float64 } `json:"usd_per_million"`
		}
	}
	p.mustJSON(&all, "models", "ls")
	if len(all.Items) != 4 || all.Items[0].Model != "gpt-6-luna" || len(all.Items[1].Agents) != 2 ||
		all.Items[2].Price.Output != 3 || !all.Items[3].Listed || all.Items[3].Price != nil {
		t.Errorf("got %+v", all.Items)
	}
	silent := on(t, pgtest.URL(t), "OPENAI_BASE_URL=http://127.0.0.1:1/v1", "AGENT_MODEL=gpt-4o").run("models", "ls")
	contains(t, silent.err, "the server lists no models", "check OPENAI_BASE_URL")
	contains(t, silent.out, "gpt-4o")
	if silent.code != 0 {
		t.Errorf("exit %d", silent.code)
	}
	if len(server.Requests()) > 0 {
		t.Error("a listing made calls")
	}
}

func TestTheDoctorAsksForATool(t *testing.T) {
	t.Parallel()
	server := modeltest.New(t)
	server.Handle(modeltest.PassesChecks)
	p := on(t, pgtest.URL(t), "OPENAI_BASE_URL="+server.URL(), "AGENT_MODEL=gpt-4o")
	contains(t, p.must("doctor"), "ok   model answers", "ok   model tools")
	if n := len(server.Requests()); n != 1 {
		t.Errorf("%d calls were made", n)
	}
	server.Handle(func(n int, req openai.ChatCompletionRequest) modeltest.Reply {
		if len(req.Tools) > 0 {
			return modeltest.Refusal(http.StatusBadRequest, "x", "", "tools are off: start with --enable-auto-tool-choice", 0)
		}
		return modeltest.PassesChecks(n, req)
	})
	got := p.run("doctor")
	contains(t, got.out, "ok   model answers", "BAD  model tools", "tools are off", "set AGENT_MODEL to one that calls tools")
	if n := len(server.Requests()); n != 3 || got.code != 1 {
		t.Errorf("exit %d after %d calls", got.code, n)
	}
}
