package engineroom

import (
	"context"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
)

// auditPage shows who did what, to which object, when, why, on whose behalf, with what result.
func (room *Room) auditPage() page {
	return page{
		path: "/audit", name: "audit", nav: "Audit", title: "Audit", open: askActivity,
		parts: []part{{name: "rows", every: 5 * time.Second, calm: true, load: room.auditRows}},
	}
}

// shownAudit is a page of the audit.
type shownAudit struct {
	activity.Audits
	Asked         activityAsked
	Older, Newest string // where the next page and the first one are; empty when there is none
}

func (room *Room) auditRows(ctx context.Context, v *visit) (any, error) {
	asked, _ := v.About.(activityAsked)
	asked.Limit = 50
	got, err := activity.Audit(ctx, room.Read, asked.Filter)
	if err != nil {
		return nil, err
	}
	shown := shownAudit{Audits: got, Asked: asked}
	if got.Next != "" {
		shown.Older = v.at("cursor", got.Next)
	}
	if asked.Cursor != "" {
		shown.Newest = v.at("cursor", "")
	}
	return shown, nil
}
