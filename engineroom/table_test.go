package engineroom

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/activity"
	"github.com/lanekeeper/lanekeeper/internal/assert"
)

func TestTableLinksKeepFilters(t *testing.T) {
	t.Parallel()
	day := time.Date(2026, 1, 31, 15, 4, 0, 0, time.UTC)
	audit := auditList{Asked: activityFilter{Filter: activity.Filter{
		Skill: "fetch", Surface: "chat", Since: day, LaneLike: "%x%", Status: activity.Error,
	}}}
	assert.Equal(t, "/v1/activity/audit?format=csv&since=2026-01-31T15%3A04%3A00Z&skill=fetch&surface=chat",
		audit.Table().Href)
	assert.Equal(t, "lane, status", audit.Table().Without())
	spend := spendFilter{Days: "7", By: "purpose", Purpose: "answer", Model: "m"}.Table()
	assert.Contains(t, spend.Href, "/v1/activity/spend?by=purpose&format=csv&model=m&since=")
	assert.Equal(t, "purpose", spend.Without())
}
