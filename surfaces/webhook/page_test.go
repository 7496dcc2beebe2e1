package webhook_test

import (
	"encoding/json"
	"net/http"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/surfaces/webhook"
)

// A page is as long as it was asked to be, and the next goes on where it ended.
func TestThePagesOfDeliveriesHaveAllOfThem(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	const all = 501
	_, err := w.pool.Exec(t.Context(), `
		insert into agent_webhook_deliveries (endpoint, delivery_id, trace_id, last_trace_id, body, body_sha256)
		select 'orders', 'd' || g, 'wh_1', 'wh_1', '', '' from generate_series(1, @all) g`, postgres.Strict{"all": all})
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	query := "?limit=500"
	for _, want := range []int{500, 1} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.server.URL+"/v1/webhooks/deliveries"+query, nil)
		if err != nil {
			t.Fatal(err)
		}
		var page webhook.Page
		if got := w.do(t, r); json.Unmarshal([]byte(got.body), &page) != nil || len(page.Items) != want {
			t.Fatalf("%s: %d, %d deliveries, want %d", query, got.status, len(page.Items), want)
		}
		for _, d := range page.Items {
			seen[d.ID] = true
		}
		if page.NextCursor != nil {
			query = "?limit=500&cursor=" + *page.NextCursor
		}
	}
	if len(seen) != all {
		t.Errorf("%d deliveries on both pages, want %d", len(seen), all)
	}
}
