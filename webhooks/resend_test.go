package webhooks_test

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/webhooks"
)

func TestADeadMessageIsSentOnceMoreUnderItsID(t *testing.T) {
	t.Parallel()
	pool := pgtest.DB(t)
	them := listens(t, func(n int, w http.ResponseWriter, _ *http.Request) {
		if n < 2 {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	target(t, pool, webhooks.TargetDefinition{URL: them.URL})
	dispatches(t, pool, []string{them.host(t)}, time.Millisecond)
	emit(t, pool, "execution.failed")
	outbox(t, pool, "dead")
	id := value[string](t, pool, `select id::text from agent_webhook_outbox`)
	resend := func(id string) (again bool, err error) {
		err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
			again, err = webhooks.Resend(t.Context(), tx, id)
			return err
		})
		return again, err
	}
	if again, err := resend(id); !again || err != nil {
		t.Fatalf("resent: %v, %v", again, err)
	}
	outbox(t, pool, "sent")
	if first, last := them.requests[0].Header.Get("webhook-id"), them.requests[them.count()-1].Header.Get("webhook-id"); first != last {
		t.Errorf("it was %s and is %s now", first, last)
	}
	if again, err := resend(id); again || err != nil {
		t.Errorf("what was sent is sent again: %v, %v", again, err)
	}
	if _, err := resend("01890000-0000-7000-8000-000000000000"); !errors.Is(err, webhooks.ErrNotFound) {
		t.Errorf("an unknown message: %v", err)
	}
}
