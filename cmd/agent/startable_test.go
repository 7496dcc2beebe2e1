package main

import (
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/api"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// What the program registers for itself is started by its surfaces, with input that they have checked. A flow that is new
// here has to be named in package api, with how it is started.
func TestNoFlowOfTheProgramsOwnIsStartedOverHTTP(t *testing.T) {
	t.Parallel()
	p := on(t, pgtest.URL(t), token, "AGENT_LISTEN=127.0.0.1:0", "AGENT_LOG_LEVEL=info")
	s := p.start("serve")
	base := "http://" + s.find(t, `listen=http://(\S+)`)
	_, admin, _ := strings.Cut(token, "=")
	req, err := http.NewRequestWithContext(t.Context(), "POST", base+"/v1/executions", strings.NewReader(`{"flow":"nobody-knows-this"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+admin)
	got, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatalf("%v; the program said %s", err, s.err.String())
	}
	defer got.Body.Close()
	body, err := io.ReadAll(got.Body)
	if err != nil || got.StatusCode != http.StatusUnprocessableEntity || !strings.Contains(string(body), "(known: external)") {
		t.Errorf("%d %s, %v", got.StatusCode, body, err)
	}
}

// The command line and HTTP refuse the same flows, each with the way that it has.
func TestReservedFlowsAreTheSameEverywhere(t *testing.T) {
	t.Parallel()
	if here := slices.Sorted(maps.Keys(reservedFlows)); !slices.Equal(here, api.ReservedFlows()) {
		t.Errorf("the command line has %v, HTTP has %v", here, api.ReservedFlows())
	}
}
