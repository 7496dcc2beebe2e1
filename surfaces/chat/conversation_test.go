package chat_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/modeltest"
	"github.com/lanekeeper/lanekeeper/internal/pgtest"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

type listedItems struct {
	Data []struct {
		ID, Role, Status string
		Content          []struct{ Type, Text string }
	}
	FirstID string `json:"first_id"`
	LastID  string `json:"last_id"`
	HasMore bool   `json:"has_more"`
}

func (l listedItems) texts() (all []string) {
	for _, item := range l.Data {
		all = append(all, item.Role+" "+item.Status+": "+item.Content[0].Text)
	}
	return all
}

func (p *process) listItems(t *testing.T, path string, headers ...string) (list listedItems) {
	t.Helper()
	r, body := p.get(t, path, headers...)
	err := json.Unmarshal([]byte(body), &list)
	require.Truef(t, err == nil && r.StatusCode == http.StatusOK, "GET %s: %d %s", path, r.StatusCode, body)
	return list
}

func TestConversationListsItsItems(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	w := newWorld(t, modeltest.Text("One."), modeltest.Text("Two."), held("Three is", " long.", release))
	p := w.process(t)
	p.answerTo(t, "maria", "1")
	p.answerTo(t, "maria", "2")
	all := p.listItems(t, "/v1/conversations/maria/items?order=asc")
	got := all.texts()
	assert.Truef(t, slices.Equal(got, []string{
		"user completed: 1", "assistant completed: One.",
		"user completed: 2", "assistant completed: Two.",
	}), "ascending: %q", got)
	var pages []string
	for after := ""; ; {
		list := p.listItems(t, "/v1/conversations/maria/items?limit=3&after="+after)
		pages = append(pages, list.texts()...)
		if after = list.LastID; !list.HasMore {
			break
		}
	}
	assert.Truef(t, slices.Equal(pages, []string{
		"assistant completed: Two.", "user completed: 2", "assistant completed: One.",
		"user completed: 1",
	}), "by pages: %q", pages)

	third := says("3")
	third.Stream = true
	stream, err := p.client(inThread("maria")...).CreateChatCompletionStream(t.Context(), third)
	require.NoError(t, err)
	defer stream.Close()
	var active listedItems
	pgtest.Eventually(t, func() bool {
		active = p.listItems(t, "/v1/conversations/maria/items?limit=2")
		return active.Data[0].Status == "in_progress" && active.Data[0].Content[0].Text == "Three is"
	}, "the unfinished answer is listed")
	id := strings.TrimPrefix(active.Data[0].ID, "msg_")
	close(release)
	r, body := p.get(t, "/v1/chat/completions/chatcmpl-"+id+"?stream=true")
	assert.Truef(t, r.StatusCode == http.StatusOK && strings.Contains(body, "long."), "attach: %d %s", r.StatusCode, body)

	for path, status := range map[string]int{
		"/v1/conversations/ana/items":                              http.StatusNotFound,
		"/v1/conversations/maria/items?limit=101":                  http.StatusBadRequest,
		"/v1/conversations/maria/items?order=up":                   http.StatusBadRequest,
		"/v1/conversations/maria/items?after=msg_x":                http.StatusBadRequest,
		"/v1/conversations/maria/items?after=" + active.Data[0].ID: http.StatusBadRequest,
		"/v1/conversations/" + strings.Repeat("x", 300) + "/items": http.StatusBadRequest,
	} {
		r, body := p.get(t, path)
		assert.Truef(t, r.StatusCode == status, "GET %s: %d %s, want %d", path, r.StatusCode, body, status)
	}
	r, body = p.get(t, "/v1/conversations/maria/items", "X-Visitor-Token", "vis_"+strings.Repeat("a", 43))
	assert.Truef(t, r.StatusCode == http.StatusNotFound, "another visitor: %d %s", r.StatusCode, body)
}
