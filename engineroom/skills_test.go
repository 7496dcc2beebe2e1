package engineroom

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/testkit/rows"
)

func TestListSkillsWithHealth(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	wantTexts(t, server.URL+"/skills", "agent apply DIR")
	wantTexts(t, server.URL+"/", "agent apply DIR")
	rows.Skill(t, pool, "fetch_price", "Fetches a price.", "", "")
	rows.Skill(t, pool, "post_tweet", "Posts.", "self-heal", "5 consecutive failures")
	rows.Calls(t, pool, "fetch_price", "success", "", 6)
	rows.Calls(t, pool, "fetch_price", "error", "no route", 2)
	for _, path := range []string{"/skills", "/"} {
		body := wantTexts(t, server.URL+path, "fetch_price", "75 %", "by self-heal", "5 consecutive failures", "120 ms")
		assert.True(t, path != "/" || strings.Index(body, "post_tweet") <= strings.Index(body, "fetch_price"),
			"disabled skills do not come first")
	}
	assert.True(t, !strings.Contains(wantTexts(t, server.URL+"/skills?state=disabled", "post_tweet",
		"/act/v1/skills/post_tweet/enable"), `id="skill-fetch_price"`), "an enabled skill is listed as disabled")
	wantTexts(t, server.URL+"/skills", `id="failing-fetch_price"`, "no route", `id="slowest-fetch_price"`)
	wantTexts(t, server.URL+"/skills?state=on+trial", "No match")
	wantTexts(t, server.URL+"/skills?skill=fetch_price", "/act/v1/skills/fetch_price/disable")
	wantError(t, server.URL+"/skills?state=broken", 400, "state is")
}

func TestSkillShowsCalls(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	rows.Skill(t, pool, "fetch_price", "Fetches a price.", "", "")
	wantTexts(t, server.URL+"/skills/fetch_price", "No call yet", "No call in this period",
		"No automation calls this skill")
	rows.Calls(t, pool, "fetch_price", "success", "", 3)
	rows.Calls(t, pool, "fetch_price", "error", "no route to host", 1)
	insert(t, pool, `insert into agent_automations (name, cron, skill_name) values ('prices', '0 * * * *', 'fetch_price')
		returning id::text`)
	wantTexts(t, server.URL+"/skills/fetch_price", "Definition, as a model sees it", "75 %", "no route to host",
		"/automations/prices",
		"/act/v1/skills/fetch_price/disable", "Calls by day, 7 days")
	wantError(t, server.URL+"/skills/nothing", 404, "there is no skill")
	wantError(t, server.URL+"/skills/%00", 404, "there is no skill")
}
