package slack_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/approvals"
	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/channels/slack"
	"github.com/lanekeeper/lanekeeper/channels/slack/slacktest"
	"github.com/lanekeeper/lanekeeper/executions"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/enginetest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/require"
	"github.com/lanekeeper/lanekeeper/internal/testkit"
	"github.com/lanekeeper/lanekeeper/lanes"
	"github.com/lanekeeper/lanekeeper/skills"
	"github.com/lanekeeper/lanekeeper/trace"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const ops = "C0OPS"

// approvalTest is an agent whose requests for approval appear in a channel of a fake Slack.
type approvalTest struct {
	*testing.T
	fake  *slacktest.Server
	pool  *pgxpool.Pool
	skill skills.Skill
	at    string // the conversation of requests
	asked int
}

// linked has two principals: Ana may decide, Bob may not.
type linked struct{}

func (linked) Asking(ctx context.Context, _, _, _, _ string) (context.Context, error) {
	return ctx, nil
}

func (linked) Approver(ctx context.Context, issuer, subject, via, message string) (context.Context, string, error) {
	switch {
	case issuer != "slack:"+slacktest.Team || via != channels.Slack:
		return nil, "", channels.ErrNotLinked
	case subject == "U0ANA":
		actor := activity.Actor{Name: "ana", Via: via, MessageID: message}
		return activity.WithActor(ctx, actor), "ana", nil
	case subject == "U0BOB":
		return nil, "", channels.ErrMayNot
	}
	return nil, "", channels.ErrNotLinked
}

func newApprovalTest(t *testing.T, mode string) *approvalTest {
	t.Helper()
	d := &approvalTest{T: t, at: ops, fake: slacktest.New(), pool: pgtest.DB(t)}
	d.fake.RetryAfter = 2 * time.Second
	t.Cleanup(d.fake.Close)
	_, err := channels.Put(t.Context(), d.pool, channels.Definition{
		Name: "ops", Type: channels.Slack, ReportTo: ops,
		Secrets:  map[string]string{"token": "${TOKEN}", "app_token": "${APP}", "signing_secret": "${SECRET}"},
		Settings: map[string]string{"mode": mode, "base_url": d.fake.URL},
	})
	require.NoError(t, err)
	_, err = skills.Put(t.Context(), d.pool, skills.Definition{
		Name: "refund", Handler: "builtin:refund", Description: "pays money back", Scope: skills.ScopeInternal,
		Trust: skills.TrustApprove, Approvals: skills.Approvals{FourEyes: true},
	}, skills.SourceWorkspace)
	require.NoError(t, err)
	d.skill, err = skills.Get(t.Context(), d.pool, "refund")
	require.NoError(t, err)
	listener := postgres.NewListener(postgres.Dialer(d.pool), slog.New(slog.DiscardHandler))
	keeper := lanes.NewKeeper(d.pool, lanes.Options{})
	r := &channels.Runner{
		Pool: d.pool, Keeper: keeper, Listener: listener, Logger: slog.New(slog.DiscardHandler), Principals: linked{},
		Client: &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()},
		Getenv: func(name string) string {
			return map[string]string{
				"TOKEN": slacktest.Token, "APP": slacktest.AppToken, "SECRET": slacktest.SigningSecret,
			}[name]
		},
		Open: map[string]channels.Open{channels.Slack: slack.Open},
		Accept: func(context.Context, channels.Visit) (channels.Accepted, error) {
			return channels.Accepted{}, fmt.Errorf("no visitor sends messages")
		},
	}
	if mode == "events" {
		d.serve(r)
	}
	testkit.Run(t, listener.Run, keeper.Run, r.Run)
	return d
}

// request requests an approval and returns its id.
func (d *approvalTest) request() (id string) {
	d.Helper()
	d.asked++
	e := enginetest.New(d.T, d.pool)
	enginetest.Register(d.T, e, "flow", func(ctx context.Context, _ json.RawMessage) (executions.Result, error) {
		asked, err := approvals.Ask(ctx, approvals.Request{
			Skill: d.skill.Name, SkillID: d.skill.ID, Revision: d.skill.Revision,
			Args: json.RawMessage(fmt.Sprintf(`{"order": %d, "note": "<!channel> *now*"}`, d.asked)),
		})
		id = asked.ID
		return executions.Result{}, err
	})
	ctx := activity.WithActor(d.Context(), activity.Actor{Name: "eve", Via: "http"})
	_, err := e.RunSync(ctx, executions.Spec{Flow: "flow", Surface: trace.Flow})
	require.NoError(d.T, err)
	return id
}

// shown waits for the message that shows a request.
func (d *approvalTest) shown(order int) (shown slacktest.Message) {
	d.Helper()
	pgtest.EventuallyWithin(d.T, 30*time.Second, func() bool {
		for _, m := range d.fake.Messages(d.at) {
			if strings.Contains(string(m.Blocks), fmt.Sprintf(`\"order\": %d`, order)) {
				shown = m
			}
		}
		return shown.TS != ""
	}, "the request is shown")
	return shown
}

// click presses a button and returns the response to the person.
func (d *approvalTest) click(user string, shown slacktest.Message, label string) string {
	d.Helper()
	before := len(d.fake.Messages(d.at))
	require.NoError(d.T, d.fake.Click(user, d.at, shown.TS, label))
	return d.feedback(before)
}

func (d *approvalTest) feedback(before int) (text string) {
	d.Helper()
	pgtest.EventuallyWithin(d.T, 30*time.Second, func() bool {
		for _, m := range d.fake.Messages(d.at)[before:] {
			if m.Only != "" {
				text = m.Text
			}
		}
		return text != ""
	}, "the click is answered")
	return text
}

func (d *approvalTest) expect(what, text, want, id, status string) {
	d.Helper()
	got, err := approvals.Get(d.Context(), d.pool, id)
	require.NoError(d.T, err)
	if !strings.Contains(text, want) || got.Status != status {
		d.Errorf("%s: %q, and the approval is %s; want %q and %s", what, text, got.Status, want, status)
	}
}

// A click decides if it comes from a linked principal with the right, once, in time, with the displayed arguments. The
// test clicks as an approver, as a user without the right and as an unlinked user. It repeats a click, changes the
// arguments and expires a button. With four eyes the requester cannot decide.
func TestApprovalsBySlackButtons(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"socket", "events"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			d := newApprovalTest(t, mode)
			var ids [5]string
			for i := range ids {
				ids[i] = d.request()
			}
			id, shown := ids[0], d.shown(1)
			assert.Truef(t, strings.Contains(string(shown.Blocks), "&lt;!channel&gt;") ||
				strings.Contains(string(shown.Blocks), `lt;!channel`), "the arguments are not escaped: %s", shown.Blocks)
			d.expect("an unlinked user", d.click("U9XX", shown, "Approve"), "not linked", id, "pending")
			d.expect("a user without the right", d.click("U0BOB", shown, "Approve"), "may not decide", id, "pending")
			d.expect("an approver", d.click("U0ANA", shown, "Approve"), "You have approved", id, "approved")
			got, err := approvals.Get(t.Context(), d.pool, id)
			if require.NoError(t, err); !strings.HasPrefix(got.Decider(), "ana via slack, message ") ||
				!strings.Contains(got.Message, shown.TS) {
				t.Errorf("decided by %s", got.Decider())
			}
			before := len(d.fake.Messages(ops))
			d.fake.ClickAgain(false) // the event is repeated
			d.fake.ClickAgain(true)
			d.expect("a replay", d.feedback(before), "used already", id, "approved")
			pgtest.EventuallyWithin(t, 30*time.Second, func() bool {
				return d.fake.Click("U0ANA", ops, shown.TS, "Approve") != nil
			}, "the buttons are removed")
			d.expect("a rejection", d.click("U0ANA", d.shown(2), "Reject"), "You have rejected", ids[1], "rejected")
			pgtest.Exec(t, d.pool, `update agent_channel_buttons set arguments_hash = 'of others' where approval_id = $1`, ids[2])
			d.expect("changed arguments", d.click("U0ANA", d.shown(3), "Approve"), "have changed", ids[2], "pending")
			pgtest.Exec(t, d.pool, `update agent_channel_buttons set expires_at = clock_timestamp() where approval_id = $1`,
				ids[3])
			pgtest.Exec(t, d.pool, `update agent_approvals set requested_by = '{ana}' where id = $1`, ids[4])
			d.expect("the requester", d.click("U0ANA", d.shown(5), "Approve"), "You requested this call", ids[4], "pending")
			d.expect("an expired button", d.click("U0ANA", d.shown(4), "Approve"), "expired", ids[3], "pending")
			pgtest.Exec(t, d.pool, `update agent_channels set report_to = 'U0ANA'`)
			pgtest.Exec(t, d.pool, `select pg_notify('agent_channels', '')`)
			d.at = "D0ANA"
			pgtest.Until(t, d.pool, 6, `select count(*) from agent_channel_buttons
				where conversation = 'U0ANA' and message_ref <> ''`)
			d.expect("in direct messages", d.click("U0ANA", d.shown(3), "Approve"), "You have approved", ids[2], "approved")
		})
	}
}

// serve serves the channel and sets its address in the fake.
func (d *approvalTest) serve(r *channels.Runner) {
	d.Helper()
	mux := http.NewServeMux()
	mux.Handle("POST /channels/{name}", r)
	server := httptest.NewServer(mux)
	d.Cleanup(server.Close)
	d.fake.EventsURL = server.URL + "/channels/ops"
}
