package api_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
)

// matched is what somebody changes on what they have seen.
type matched struct{ path, first, then, what string }

func TestAChangeIsBasedOnWhatTheAdminHasSeen(t *testing.T) {
	t.Parallel()
	a := start(t)
	a.objective("grow")
	a.automation("nightly")
	a.skill("look")
	for _, m := range []matched{
		{"/v1/objectives/grow", "pause", "resume", "objective"},
		{"/v1/automations/nightly", "disable", "enable", "automation"},
		{"/v1/skills/look", "disable", "enable", "skill"},
	} {
		t.Run(m.what, func(t *testing.T) {
			seen := a.get(m.path, &struct{}{}).Get("ETag")
			act := func(action, name, tag string) (int, string) {
				w := a.raw("POST", m.path+"/"+action, `{"reason":"x"}`, having(name, tag))
				return w.Code, w.Body.String()
			}
			if code, said := act(m.first, "If-Match", seen); code != 200 {
				t.Fatalf("%s of what was seen: %d %s", m.first, code, said)
			}
			now := a.get(m.path, &struct{}{}).Get("ETag")
			if now == seen || now == "" {
				t.Fatalf("the ETag was %s and is %s", seen, now)
			}
			code, said := act(m.then, "If-Match", seen) // another admin, whose page is from before
			var p struct {
				problem
				Current map[string]any
			}
			if err := json.Unmarshal([]byte(said), &p); err != nil || code != 412 || p.Type != "urn:lanekeeper:problem:changed-meanwhile" || p.Current["name"] == nil {
				t.Errorf("%s of what was seen before: %d %s, %v", m.then, code, said, err)
			}
			tag := fmt.Sprintf(`"%v"`, p.Current["revision"])
			if m.what == "skill" {
				tag = fmt.Sprintf(`"%v"`, p.Current["state_revision"])
			}
			if still := a.get(m.path, &struct{}{}).Get("ETag"); still != now || tag != now {
				t.Errorf("it was at %s, is at %s, and the refusal says %s", now, still, tag)
			}
			if n := value[int](t, a.pool, `select count(*) from agent_activity where skill_name = $1`, m.then+"_"+m.what); n != 0 {
				t.Errorf("the refusal is recorded %d times", n)
			}
			for _, bad := range [][2]string{{"If-Match", strings.Trim(now, `"`)}, {"If-Match", `"0"`}, {"If-Match", ""}, {"If-None-Match", "*"}, {"If-None-Match", now}} {
				if code, said := act(m.then, bad[0], bad[1]); code != 400 {
					t.Errorf("%s: %s is answered %d %s", bad[0], bad[1], code, said)
				}
			}
			for n, tag := range []string{"W/" + now, "*", now} { // a proxy has weakened it; any; what was there before those
				code, said := act([]string{m.then, m.first, m.then}[n], "If-Match", tag)
				if want := []int{200, 200, 412}[n]; code != want {
					t.Errorf("If-Match: %s is answered %d %s, want %d", tag, code, said, want)
				}
			}
			a.post(m.path+"/"+m.then, `{"reason":"x"}`, &struct{}{}) // it says nothing, and does what it says
			none := m.path[:strings.LastIndexByte(m.path, '/')] + "/none/" + m.first
			a.refused(a.raw("POST", none, `{"reason":"x"}`, having("If-Match", `"1"`)), 404, "not found")
		})
	}
}
