package main

import (
	"fmt"
	"image"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// The owner of the shop sees the day of the order desk in the Engine Room, and decides about a refund there. make
// pictures takes the pictures of docs/engine-room.md from this test.
func TestOwnerDecidesInEngineRoom(t *testing.T) {
	t.Parallel()
	d := newShopDay(t, fmt.Sprintf("AGENT_HEARTBEAT_CRON=%d * * * *", time.Now().Add(25*time.Minute).Minute()))
	require.NoError(t, d.app.RunWithLeases(t.Context(), d.runMorning))
	d.must("chat", "--thread", "ana", "Order 1002 arrived damaged, my e-mail is ana@example.com")
	pgtest.Until(t, d.db, 1, `select count(*) from agent_requests where status = 'pending'`)
	d.must("chat", "--thread", "ana", "--file", d.photo(), "Here is the photo")
	pgtest.Until(t, d.db, 1, `select count(*) from agent_approvals where status = 'pending'`)

	w := openEngineRoom(t, d.program, d.db, d.base)
	w.waitLive()
	assert.Contains(t, w.Text("#verdict"), "Working", "of $5.00")
	assert.Contains(t, w.Text("#need-approval"), "1", "Approval requested", "refund_order", `"order": 1002`)
	w.picture("overview", browser.Look{})

	w.Click("#need-approval a[href^='/approvals/']")
	w.Shows("Exact arguments")
	w.picture("approval", browser.Look{Dark: true})
	w.Type("form.decide input[name=reason]", "the photo shows it")
	w.Click(`form.decide [value="approve"]`)
	w.Shows("The decision is recorded")
	pgtest.Until(t, d.db, 1, `select count(*) from agent_messages
		where content = 'Order 1002 is refunded. The money is back on your account within five days.'`)
	pgtest.Equal(t, d.shop, true, `select refunded_at is not null from orders where id = 1002`)

	w.Go(w.base + "/traces/" + pgtest.Value[string](t, d.db,
		`select trace_id from agent_executions where surface = 'chat' order by id limit 1`))
	w.Shows("order_status")
	w.picture("trace", browser.Look{})
}

// photo writes a picture of a damaged shelf and returns its path.
func (d *shopDay) photo() string {
	d.t.Helper()
	shelf := image.NewRGBA(image.Rect(0, 0, 320, 240))
	for i := range 320 * 240 {
		shelf.Set(i%320, i/320, color.RGBA{uint8(150 + i%37), uint8(110 + i/320%23), 60, 255})
	}
	file, err := os.Create(filepath.Join(d.t.TempDir(), "shelf.png"))
	require.NoError(d.t, err)
	require.NoError(d.t, png.Encode(file, shelf))
	require.NoError(d.t, file.Close())
	return file.Name()
}

// picture stores a picture of the page for the documentation, if AGENT_PICTURES names its folder.
func (w *browserTest) picture(name string, look browser.Look) {
	if dir := os.Getenv("AGENT_PICTURES"); dir != "" {
		w.As(look)
		w.Screenshot(filepath.Join(dir, name+".png"), false)
		w.As(browser.Look{})
	}
}
