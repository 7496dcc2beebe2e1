package engineroom

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/lanekeeper/lanekeeper/internal/postgres"
)

const (
	// hitsShown bounds the hits of a group.
	hitsShown = 6
	// maxNames bounds the rows of most tables whose names a search compares: the first by name, or the newest.
	maxNames = 2000
	// maxRecentRuns bounds the newest executions whose texts a search compares.
	maxRecentRuns = 1000
	// maxRecentThreads bounds the newest threads, and memories, whose names a search compares.
	maxRecentThreads = 5000
)

// hit is one result of a search.
type hit struct {
	Href, Title string
	About       string     // one line about it
	State       string     // empty for none
	At          *time.Time // nil for none
	ID          string     // shown short; empty for none
}

// hitGroup are the hits of one kind.
type hitGroup struct {
	Name, Label string
	Hits        []hit
	More        string // the address of a list with further hits; empty for none
	Cut         bool   // further hits have no list
	rank        int    // of the group; the lowest is first
}

// findQuery is the text of a search.
type findQuery struct {
	Text string
	like string   // LIKE pattern of names that contain the text
	id   fragment // the text as a fragment of an id
	isID bool     // the text may be a part of an id
	// runs has the executions whose ids contain the text. Two finders need them; nil makes each read them.
	runs *[]string
}

// newFindQuery parses a text. ok is false for an empty text.
func newFindQuery(text string) (q findQuery, ok bool) {
	text = strings.TrimSpace(text)
	q = findQuery{Text: text, like: containsPattern(text)}
	q.id, q.isID = fragmentOf(text)
	return q, text != ""
}

// matches reports whether a text contains the query, in upper or lower case.
func (q findQuery) matches(texts ...string) bool {
	return slices.ContainsFunc(texts,
		func(s string) bool { return strings.Contains(strings.ToLower(s), strings.ToLower(q.Text)) })
}

// rank is lower for a better match of a title.
func (q findQuery) rank(title string) int {
	title, text := strings.ToLower(title), strings.ToLower(q.Text)
	switch {
	case title == text:
		return 0
	case strings.HasPrefix(title, text):
		return 1
	case strings.Contains(title, text):
		return 2
	}
	return 3
}

// findPage finds anything by a part of its id or name.
func (room *Room) findPage() page {
	return page{
		path: "/find", name: "find", title: "Find",
		open: func(_ context.Context, req *pageRequest) (string, error) {
			text, err := req.textFilter("q")
			req.Subject = text
			return "Find", err
		},
		parts: []part{{name: "results", load: func(ctx context.Context, req *pageRequest) (any, error) {
			text, _ := req.Subject.(string)
			return room.search(ctx, req, text)
		}}},
	}
}

// searchResult is the result of a search.
type searchResult struct {
	Text   string
	Groups []hitGroup
	IsID   bool
	Window int64 // the number of searched ids of executions
	Names  int64 // the number of searched names of most kinds
}

// Count is the number of hits.
func (f searchResult) Count() (n int) {
	for _, g := range f.Groups {
		n += len(g.Hits)
	}
	return n
}

// search finds the groups of hits that the viewer may open, best first. Without a text it returns the newest items.
func (room *Room) search(ctx context.Context, req *pageRequest, text string) (searchResult, error) {
	q, ok := newFindQuery(text)
	f := searchResult{Text: q.Text, IsID: q.isID, Window: maxFragments, Names: maxNames}
	if !ok {
		groups, err := room.recentItems(ctx, req)
		f.Groups = groups
		return f, err
	}
	found, err := room.findAll(ctx, q)
	if err != nil {
		return f, err
	}
	for i, group := range finders {
		hits := req.openable(found[i])
		if len(hits) == 0 {
			continue
		}
		g := hitGroup{Name: group.name, Label: group.label, Hits: hits[:min(len(hits), hitsShown)], rank: 4 * len(finders)}
		if len(hits) > hitsShown {
			g.More, g.Cut = group.all, group.all == ""
		}
		for _, h := range g.Hits {
			g.rank = min(g.rank, q.rank(h.Title)*len(finders)+i)
		}
		if group.byID && q.isID {
			g.rank = i - len(finders)
		}
		f.Groups = append(f.Groups, g)
	}
	slices.SortStableFunc(f.Groups, func(a, b hitGroup) int { return cmp.Compare(a.rank, b.rank) })
	return f, nil
}

// openable returns the hits whose pages the viewer may open.
func (req *pageRequest) openable(hits []hit) []hit {
	return slices.DeleteFunc(hits, func(h hit) bool { return !req.mayOpen(h.Href) })
}

// findAll returns the hits of each kind. It searches two kinds at a time.
func (room *Room) findAll(ctx context.Context, q findQuery) ([][]hit, error) {
	runs, err := []string{}, error(nil)
	if q.isID {
		if runs, err = room.matchingRuns(ctx, q); err != nil {
			return nil, err
		}
	}
	q.runs = &runs
	hits := make([][]hit, len(finders))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(2)
	for i, kind := range finders {
		group.Go(func() (err error) {
			hits[i], err = kind.find(room, ctx, q)
			return err
		})
	}
	return hits, group.Wait()
}

// findResults serves the results alone, for the dialog.
func (room *Room) findResults(w http.ResponseWriter, r *http.Request) {
	req := newPageRequest(r, room.findPage(), "")
	text, err := req.textFilter("q")
	var body []byte
	if err == nil {
		_, err = room.Read.Do(r.Context(), false, func(ctx context.Context) error {
			f, err := room.search(ctx, req, text)
			if err == nil {
				body, err = room.execute("find-box", f)
			}
			return err
		})
	}
	if err != nil {
		room.Refuse(w, r, err)
		return
	}
	room.writePage(w, r, http.StatusOK, req.unlink(body))
}

// recentItems are open approvals, the newest failures and executions, and the pages.
func (room *Room) recentItems(ctx context.Context, req *pageRequest) ([]hitGroup, error) {
	latest, err := room.runHits(ctx, `
		select e.id from agent_executions e order by e.id desc limit @limit`, postgres.Strict{"limit": hitsShown})
	if err != nil {
		return nil, err
	}
	failed, err := room.runHits(ctx, `
		(select e.id from agent_executions e where e.status = 'failed' order by e.id desc limit @limit)
		union all
		(select e.id from agent_executions e where e.status = 'timeout' order by e.id desc limit @limit)
		order by id desc limit @limit`, postgres.Strict{"limit": hitsShown})
	if err != nil {
		return nil, err
	}
	pending, err := room.approvalHits(ctx, `
		select a.id from agent_approvals a where a.status = 'pending' order by a.id desc limit @limit`,
		postgres.Strict{"limit": hitsShown})
	if err != nil {
		return nil, err
	}
	pages, _ := room.findPages(ctx, findQuery{})
	var groups []hitGroup
	for _, g := range []hitGroup{
		{Name: "pending", Label: "Approval requested", Hits: pending, More: "/approvals"},
		{Name: "failed", Label: "Failed last", Hits: failed, More: "/executions?failed=1"},
		{Name: "latest", Label: "Latest executions", Hits: latest, More: "/executions"},
		{Name: "pages", Label: "Pages", Hits: pages},
	} {
		if g.Hits = req.openable(g.Hits); len(g.Hits) > 0 {
			groups = append(groups, g)
		}
	}
	return groups, nil
}
