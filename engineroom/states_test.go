package engineroom

import (
	"fmt"
	"html/template"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

type namedState string

func TestStateHasShapeAndWord(t *testing.T) {
	t.Parallel()
	parsed := template.Must(parseTemplates())
	failed := "failed"
	for name, test := range map[string]struct {
		state any
		want  string
	}{
		"text": {
			"pending_approval",
			`<span class="status status-pending-approval tone-warn"><span aria-hidden="true">◷</span>pending approval</span>`,
		},
		"named type": {
			namedState("error"),
			`<span class="status status-error tone-bad"><span aria-hidden="true">✕</span>error</span>`,
		},
		"pointer": {&failed, `<span class="status status-failed tone-bad"><span aria-hidden="true">✕</span>failed</span>`},
		"not known": {
			`"><b>`,
			`<span class="status status----b- "><span aria-hidden="true">·</span>&#34;&gt;&lt;b&gt;</span>`,
		},
		"none": {(*string)(nil), `<span class="status status- "><span aria-hidden="true">·</span></span>`},
	} {
		var b strings.Builder
		require.NoError(t, parsed.ExecuteTemplate(&b, "status", test.state))
		assert.Equal(t, test.want, b.String(), name)
	}
}

// colours returns the custom properties of the style sheet that are pairs: light, dark.
func colours(t *testing.T) map[string][2]string {
	t.Helper()
	sheet, err := assetFiles.ReadFile("assets/room.css")
	require.NoError(t, err)
	pairs := map[string][2]string{}
	for _, m := range regexp.MustCompile(`--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);`).FindAllStringSubmatch(
		string(sheet), -1) {
		pairs[m[1]] = [2]string{m[2], m[3]}
	}
	return pairs
}

// luminance is the relative luminance of WCAG 2.2.
func luminance(t *testing.T, colour string) float64 {
	t.Helper()
	rgb, err := strconv.ParseUint(colour[1:], 16, 32)
	require.NoError(t, err)
	sum := 0.0
	for i, weight := range []float64{0.2126, 0.7152, 0.0722} {
		c := float64(rgb>>(16-8*i)&255) / 255
		if c <= 0.04045 {
			c /= 12.92
		} else {
			c = math.Pow((c+0.055)/1.055, 2.4)
		}
		sum += weight * c
	}
	return sum
}

func TestColourContrast(t *testing.T) {
	t.Parallel()
	pairs := colours(t)
	measure := func(fore, back string, least float64) {
		for i, theme := range []string{"light", "dark"} {
			a, b := luminance(t, pairs[fore][i]), luminance(t, pairs[back][i])
			if ratio := (max(a, b) + 0.05) / (min(a, b) + 0.05); ratio < least {
				t.Errorf("--%s on --%s is %.2f:1 in the %s theme, want %s:1", fore, back, ratio, theme, fmt.Sprint(least))
			}
		}
	}
	for _, back := range []string{"bg", "card", "raised"} {
		for _, fore := range []string{"fg", "muted", "accent", "good", "bad", "warn", "info"} {
			measure(fore, back, 4.5)
		}
		for _, fore := range []string{"edge", "k-model", "k-call", "k-wait", "k-lane", "k-retry", "k-phase"} {
			measure(fore, back, 3)
		}
	}
	for _, tone := range []string{"good", "bad", "warn", "info", "accent"} {
		measure(tone, tone+"-soft", 4.5)
	}
	measure("on-accent", "accent", 4.5)
}

// The pages use plain sentences. These phrases were not plain.
func TestPagesAvoidOddPhrases(t *testing.T) {
	t.Parallel()
	odd := regexp.MustCompile(`(?i)(spoken in|needs your leave|runs given up|what came|were looked at|put off|\$0<|` +
		`left left|in due)`)
	files, err := templateFiles.ReadDir("templates")
	require.NoError(t, err)
	for _, f := range files {
		text, err := templateFiles.ReadFile("templates/" + f.Name())
		require.NoError(t, err)
		found := odd.FindString(string(text))
		assert.Truef(t, found == "", "%s says %q", f.Name(), found)
	}
}
