package chat

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/lanekeeper/lanekeeper/documents"
	"github.com/lanekeeper/lanekeeper/internal/postgres"
	"github.com/lanekeeper/lanekeeper/internal/responsewire"
	"github.com/lanekeeper/lanekeeper/threads"
	"github.com/lanekeeper/lanekeeper/trace"
)

const (
	defaultItems = 20
	maxItems     = 100
	maxActive    = 20 // unfinished answers of a page, the oldest; later ones are not listed
)

// ConversationItemsHandler serves GET /v1/conversations/{id}/items: OpenAI's list of the items of a conversation,
// newest first unless order=asc. An unfinished answer has the status in_progress and the id msg_ with the id of its
// execution: GET /v1/responses/resp_… attaches to it.
func (c *Chat) ConversationItemsHandler() http.Handler { return c.handler(c.conversationItems) }

type itemPage struct {
	thread    string
	after     string // the id of a message
	ascending bool
	limit     int
}

// conversationItems lists the visible messages of a conversation of the caller, a page at a time.
func (c *Chat) conversationItems(w http.ResponseWriter, r *http.Request, _ trace.ID) error {
	who, err := c.principal(r)
	if err != nil {
		return err
	}
	name := r.PathValue("id")
	thread, known, err := threads.Resolve(r.Context(), c.Front, who, name)
	if err != nil {
		return threadError(err)
	}
	if !known {
		return notFound("conversation_not_found", "There is no conversation %q.", truncate(name, 100))
	}
	page, err := readItemPage(r)
	if err != nil {
		return err
	}
	page.thread = thread
	list, active, err := c.readItems(r.Context(), page)
	if errors.Is(err, threads.ErrNoMessage) {
		return badRequest("after", "invalid_value", "There is no item %q in this conversation.", itemPrefix+page.after)
	}
	if err != nil {
		return err
	}
	more := len(list) > page.limit
	list = list[:min(len(list), page.limit)]
	items, err := c.items(r.Context(), page, list, active, more)
	if err != nil {
		return err
	}
	answer := map[string]any{"object": "list", "data": items, "has_more": more, "first_id": nil, "last_id": nil}
	if n := len(items); n > 0 {
		answer["first_id"], answer["last_id"] = items[0].ID, items[n-1].ID
	}
	if n := len(list); n > 0 { // the next page follows a stored message
		answer["last_id"] = itemPrefix + list[n-1].ID
	}
	return responsewire.WriteJSON(w, answer)
}

// readItems reads the messages of a page, with one more for whether others follow, and the unfinished answers. One
// snapshot has both: in two, an answer that ends in between would be in neither.
func (c *Chat) readItems(ctx context.Context, p itemPage) (list []threads.Message, active []item, err error) {
	options := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, c.Front, options, func(tx pgx.Tx) error {
		list, err = threads.Visible(ctx, tx, p.thread, p.after, p.ascending, p.limit+1)
		if err == nil {
			active, err = c.activeItems(ctx, tx, p.thread)
		}
		return err
	})
	return list, active, err
}

func readItemPage(r *http.Request) (p itemPage, err error) {
	q := r.URL.Query()
	p.limit = defaultItems
	if limit := q.Get("limit"); limit != "" {
		if p.limit, err = strconv.Atoi(limit); err != nil || p.limit < 1 || p.limit > maxItems {
			return p, badRequest("limit", "invalid_value", "limit must be a number from 1 to %d.", maxItems)
		}
	}
	order := q.Get("order")
	if order != "" && order != "asc" && order != "desc" {
		return p, badRequest("order", "invalid_value", "order must be asc or desc.")
	}
	p.ascending = order == "asc"
	p.after = strings.TrimPrefix(q.Get("after"), itemPrefix)
	return p, nil
}

// item is a message in a list of items.
type item struct {
	ID      string        `json:"id"`
	Type    string        `json:"type"`
	Role    string        `json:"role"`
	Status  string        `json:"status"`
	Content []itemContent `json:"content"`
	Created int64         `json:"created_at,omitempty"` // not OpenAI's
}

// itemContent is a part of an item.
type itemContent struct {
	Type     string `json:"type"`
	Text     string `json:"text,omitempty"`
	URL      string `json:"image_url,omitempty"`
	Detail   string `json:"detail,omitempty"`
	FileID   string `json:"file_id,omitempty"`
	Filename string `json:"filename,omitempty"`
}

// items converts messages to items and adds the unfinished answers at the newest end of the conversation.
func (c *Chat) items(
	ctx context.Context, p itemPage, list []threads.Message, active []item, more bool,
) ([]item, error) {
	images, err := threads.Images(ctx, c.Front, list, false)
	if err != nil {
		return nil, err
	}
	items := make([]item, 0, len(list)+1)
	for _, m := range list {
		items = append(items, itemOf(m, images[m.ID]))
	}
	if p.ascending && more || !p.ascending && p.after != "" {
		return items, nil
	}
	if p.ascending {
		return append(items, active...), nil
	}
	slices.Reverse(active)
	return append(active, items...), nil
}

// itemOf converts a message. Excerpts of documents, which the model reads, become files.
func itemOf(m threads.Message, images []threads.Image) item {
	it := item{ID: itemPrefix + m.ID, Type: "message", Role: m.Role, Status: "completed", Created: m.CreatedAt.Unix()}
	if m.Interrupted {
		it.Status = "incomplete"
	}
	text, files := m.Content, []documents.Excerpt(nil)
	kind := "output_text"
	if m.Role == threads.User {
		kind = "input_text"
		text, files = documents.SplitExcerpts(m.Content)
	}
	if text != "" || len(files)+len(images) == 0 {
		it.Content = append(it.Content, itemContent{Type: kind, Text: text})
	}
	for _, f := range files {
		it.Content = append(it.Content, itemContent{Type: "input_file", FileID: f.ID, Filename: f.Name})
	}
	for _, image := range images {
		switch {
		case image.URL != "":
			it.Content = append(it.Content, itemContent{
				Type: "input_image", URL: image.URL, Detail: cmp.Or(image.Detail, "auto"),
			})
		case len(files) == 0: // a part without data stands for the stored bytes, which are not sent again
			it.Content = append(it.Content, itemContent{Type: "input_file", Filename: "image"})
		}
	}
	return it
}

// activeItems returns the unfinished answers of a thread, oldest first.
func (c *Chat) activeItems(ctx context.Context, tx pgx.Tx, thread string) ([]item, error) {
	rows, err := tx.Query(ctx, `
		select x.id::text, coalesce(d.content, ''), x.created_at
		  from agent_executions x left join agent_message_drafts d on d.execution_id = x.id
		 where x.thread_id = @thread and x.completed_at is null and x.flow = any(@flows) order by x.id limit @limit`,
		postgres.Strict{"thread": thread, "flows": []string{Flow, RelayFlow}, "limit": maxActive})
	return postgres.Collect(rows, err, "read unfinished answers", func(row pgx.CollectableRow) (item, error) {
		it := item{Type: "message", Role: threads.Assistant, Status: "in_progress"}
		var text string
		var created time.Time
		if err := row.Scan(&it.ID, &text, &created); err != nil {
			return it, fmt.Errorf("read row: %w", err)
		}
		if here, ok := c.feeds.liveText(it.ID); ok {
			text = here
		}
		it.ID, it.Created = itemPrefix+it.ID, created.Unix()
		it.Content = []itemContent{{Type: "output_text", Text: text}}
		return it, nil
	})
}
