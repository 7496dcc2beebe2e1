package engineroom

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/browser"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Rows and filters are in one zone. The page names it, and remembers the reader's choice.
func TestTimeZoneChoice(t *testing.T) {
	t.Parallel()
	pool, server := openRoom(t)
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	at := time.Now().UTC().Truncate(24 * time.Hour).Add(-12*time.Hour + 30*time.Minute) // yesterday
	localTime := func(minutes int, layout string) string {
		return at.Add(time.Duration(minutes) * time.Minute).In(berlin).Format(layout)
	}
	utc := func(minutes int, layout string) string {
		return at.Add(time.Duration(minutes) * time.Minute).Format(layout)
	}
	const typed = "2006-01-02T15:04"
	insert(t, pool, `insert into agent_activity (id, trace_id, surface, skill_name, status, created_at, finished_at)
		values (lanekeeper.agent_uuid7_floor($1), 'op_01J8052XG1XHJAZ95GX5TCNBAZ', 'operate', 'lunch', 'success', $1, $1)
		returning id::text`, at)
	p := browser.Open(t, browser.Look{Zone: "Europe/Berlin"})
	p.Go(server.URL + "/activity?since=" + utc(-30, typed) + "Z")
	p.Until("the zone is named", `document.getElementById("zone").selectedOptions[0].text === "local (Europe/Berlin)"`)
	const row = `document.querySelector("#rows time").title`
	p.Until("the row is local, and its title has the zone", `/`+localTime(0, "2 January 2006 at 15:04:05")+
		` (CES?T|GMT\+[12])/.test(`+row+`)`)
	const since = `document.querySelector("input[name=since]")`
	p.Until("the filter is local", since+`.value === "`+localTime(-30, typed)+`" &&
		`+since+`.closest("label").textContent.includes("local (Europe/Berlin)")`)

	// A typed time is local. The resulting address is absolute.
	p.Eval(since+`.value = "`+localTime(1, typed)+`"`, nil)
	p.Click(".filters button[type=submit]")
	p.Until("the address is absolute", `location.search.includes("since=`+url.QueryEscape(utc(1, typed))+`Z")`)
	p.Shows("No activity matches")
	p.Eval(since+`.value = "`+localTime(-1, typed)+`"`, nil)
	p.Click(".filters button[type=submit]")
	p.Until("the row is there", `document.querySelector("#rows time") !== null`)
	p.Until("the server wrote the filter in the zone of the cookie",
		since+`.getAttribute("value") === "`+localTime(-1, typed)+`"`)

	// The choice holds on the next page.
	p.Eval(`(() => {
		const zone = document.getElementById("zone");
		zone.value = "utc";
		zone.dispatchEvent(new Event("change", { bubbles: true }));
	})()`, nil)
	p.Until("rows and filters are in UTC",
		row+`.endsWith("`+utc(0, "15:04:05")+` UTC") && `+since+`.value === "`+utc(-1, typed)+`"`)
	p.Go(server.URL + "/activity?since=" + utc(-1, typed))
	p.Until("rows and filters are still in UTC", row+`.endsWith("`+utc(0, "15:04:05")+` UTC") &&
		document.getElementById("zone").value === "utc" && `+since+`.closest("label").textContent.includes("Since, UTC")`)
	wantNoBrowserErrors(t, p)

	// Without a script the zone is UTC, and the page says so.
	bare := browser.Open(t, browser.Look{Zone: "Europe/Berlin", NoScript: true})
	bare.Go(server.URL + "/activity?since=" + utc(-1, typed))
	assert.Contains(t, bare.Text(".top"), "Times: UTC")
	assert.Contains(t, bare.Text("#rows"), utc(0, "2006-01-02 15:04:05")+" UTC")
}

// A forged cookie cannot name a file or an unknown zone.
func TestZoneCookieIsValidated(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{
		"Europe/Berlin": "Europe/Berlin", "America/Argentina/Buenos_Aires": "America/Argentina/Buenos_Aires", "UTC": "UTC",
		"Etc/GMT+5": "Etc/GMT+5", "": "UTC", "Local": "UTC", "../../etc/passwd": "UTC", "Europe/../../etc": "UTC",
		"Mars/Base": "UTC", "/etc/localtime": "UTC", strings.Repeat("A", 5000): "UTC",
	} {
		r, err := http.NewRequest(http.MethodGet, "http://room.example/", nil)
		require.NoError(t, err)
		r.AddCookie(&http.Cookie{Name: zoneCookie, Value: value})
		got := zoneOf(r).String()
		assert.Truef(t, got == want, "zone %.40q is read as %s, want %s", value, got, want)
	}
}
