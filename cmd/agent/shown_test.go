package main

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
)

// An execution keeps what it needs for a replay; no command shows the secrets in it, or more than anybody can read.
func TestExecutionsAreShownWithoutSecrets(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	db := connect(t, url)
	const id = "01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d"
	for _, sql := range []string{
		`insert into agent_executions (id, trace_id, surface, flow, status, input, variables, result_summary, cancel_reason)
		 values ('01a1fc7a-3cbd-7d8a-af56-b10ba12fb33d', 'fl_01JD3V7K8ZQ6W2M5T9X4C1B0AE', 'flow', 'import', 'pending',
		         jsonb_build_object('api_key', 'Zq81xLm0Kk77', 'long', repeat('long ', 40000)), '{"token": "Zq81xLm0Kk77"}',
		         'password=Zq81xLm0Kk77', 'Bearer Zq81xLm0Kk77')`,
		`with w as (insert into agent_workers (name, expires_at) values ('w', clock_timestamp() + interval '1 hour') returning id)
		 update agent_executions x set status = 'running', claimed_by = w.id, claim = x.claim + 1 from w`,
		`insert into agent_checkpoints (execution_id, step, claim, output)
		 select id, 'login', claim, '{"password": "Zq81xLm0Kk77"}' from agent_executions`,
	} {
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	p := on(t, url)
	for _, args := range [][]string{
		{"executions", "ls"},
		{"executions", "ls", "--json"},
		{"executions", "show", id},
		{"executions", "show", id, "--json"},
	} {
		got := p.must(args...)
		if strings.Contains(got, "Zq81xLm0Kk77") || !strings.Contains(got, "[redacted]") || len(got) > 128<<10 {
			t.Errorf("agent %v: %d bytes: %.2000s", args, len(got), got)
		}
	}
}

// What a heartbeat and a call print of their executions is redacted too.
func TestWhatWasRunIsShownWithoutSecrets(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t)
	_, err := connect(t, url).Exec(t.Context(), `
		create function spill() returns trigger language plpgsql as $$
		begin
			new.result_summary := 'password=Zq81xLm0Kk77';
			return new;
		end $$;
		create trigger spill before update on agent_executions for each row when (new.status = 'completed') execute function spill()`)
	if err != nil {
		t.Fatal(err)
	}
	p := on(t, url)
	query := `select 'Zq81xLm0Kk77' as password`
	p.must("apply", folder(t, map[string]string{"one.yaml": strings.Replace(goodSkill, "select 1 as n", query, 1)}))
	for _, args := range [][]string{{"heartbeat"}, {"heartbeat", "--json"}, {"skills", "call", "one"}, {"skills", "call", "one", "--json"}} {
		got := p.must(args...)
		if strings.Contains(got, "Zq81xLm0Kk77") || !strings.Contains(got, "[redacted]") {
			t.Errorf("agent %v: %s", args, got)
		}
	}
}

func TestWhatDoesNotPrintIsShownEscaped(t *testing.T) {
	t.Parallel()
	if got, want := escaped("{\n  \"a\": \"é\u202e\u200b\U000e0041\"\n}"), "{\n  \"a\": \"é\\u202e\\u200b\\udb40\\udc41\"\n}"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}
