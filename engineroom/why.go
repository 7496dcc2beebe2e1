package engineroom

import (
	"context"
	"net/url"
	"strings"

	reasons "github.com/lanekeeper/lanekeeper/why"
)

// whyPanel is why a trace is what it is.
type whyPanel struct {
	ID    string
	Parts []whyPart
}

type whyPart struct {
	Title string
	Rows  []whyRow
}

// whyRow is a reason with where it leads.
type whyRow struct {
	reasons.Reason
	Depth int
	Links []whyLink
}

type whyLink struct{ Word, URL string }

func (room *Room) traceWhy(ctx context.Context, v *visit) (any, error) {
	about, _ := v.About.(*tracedVisit)
	answer, err := reasons.Of(ctx, room.Read, about.ID)
	if err != nil {
		return nil, err
	}
	panel := &whyPanel{ID: about.ID}
	for _, p := range answer.Parts() {
		part, depths := whyPart{Title: p.Title()}, answer.Depths(p)
		for i, r := range answer.Of(p) {
			part.Rows = append(part.Rows, whyRow{Reason: r, Depth: depths[i], Links: whyLinks(about.ID, r)})
		}
		panel.Parts = append(panel.Parts, part)
	}
	return panel, nil
}

// Trouble reports a row about something that went wrong.
func (r whyRow) Trouble() bool { return r.Part == reasons.Trouble && r.Kind != reasons.More }

// whyLinks are the other trace of a row, where it has one, and what else of it has a page.
func whyLinks(trace string, r reasons.Reason) []whyLink {
	var links []whyLink
	if r.TraceID != trace && r.Kind != reasons.More {
		links = append(links, whyLink{"trace " + r.TraceID, "/traces/" + url.PathEscape(r.TraceID)})
	}
	for _, ref := range []string{r.FromRef, r.ToRef} {
		word, id, _ := strings.Cut(ref, " ")
		pages := map[string]string{
			"execution": "/executions/", "approval": "/approvals/", "delivery": "/deliveries/", "outgoing": "/outgoing/", "thread": "/threads/",
		}
		at, has := pages[word]
		if !has || id == "" {
			continue
		}
		if word != "thread" {
			id = strings.TrimSpace(id)
			links = append(links, whyLink{word + " " + short(id), at + url.PathEscape(id)})
			continue
		}
		links = append(links, whyLink{"thread " + cut(40, id), at + url.PathEscape(id)})
	}
	return links
}
