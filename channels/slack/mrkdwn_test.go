package slack

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

func TestMarkdownBecomesMrkdwn(t *testing.T) {
	t.Parallel()
	for markdown, want := range map[string]string{
		"# Title *one* ##":                "*Title _one_*",
		"**bold** and *soft* and ~~no~~":  "*bold* and _soft_ and ~no~",
		"**bold *soft* `c*d`**":           "*bold _soft_ `cd`*",
		"2 * 3 * 4, snake_case_name":      "2 * 3 * 4, snake_case_name",
		"- one\n  - two\n- [x] three":     "• one\n  • two\n☑ three",
		"> said\n> more":                  "> said\n> more",
		"[docs](https://x.org/?a=1&b=2)":  "<https://x.org/?a=1&amp;b=2|docs>",
		"[run](javascript:alert(1))":      "run (javascript:alert(1))",
		"![a|b](https://x.org/p.png)":     "<https://x.org/p.png|a¦b>",
		"<!channel> <@U1> & `<a>`":        "&lt;!channel&gt; &lt;@U1&gt; &amp; `&lt;a&gt;`",
		"[<!here>](https://x.org/x>)":     "<https://x.org/x|&lt;!here&gt;>",
		"[<!here>](https://x.org/>x)":     "[&lt;!here&gt;](https://x.org/&gt;x)",
		`\*plain\*`:                       "*plain*",
		"```go\na := **b**\n```\nend":     "```\na := **b**\n```\nend",
		"| a | b |\n|---|---|\n| 1 | 2 |": "```\n a | b \n 1 | 2 \n```",
		"a\n---\nb":                       "a\n———\nb",
		"":                                "",
		"**open and <!everyone>":          "**open and &lt;!everyone&gt;",
	} {
		assert.Equal(t, want, strings.Join(sections(markdown), "\n§\n"), markdown, "became")
	}
}

// For any text, sections stay within the limits, fences stay balanced, and no mention appears.
func TestSectionsStayWithinTheLimits(t *testing.T) {
	t.Parallel()
	const maxAll = 13_200 // characters of the sections of one message
	limits := new(Transport).Limits()
	assert.True(t, limits.Edits > 0, "an answer is not shown while it is written")
	for name, text := range map[string]string{
		"words":          strings.Repeat("some words & more ", 2000),
		"one word":       strings.Repeat("x", 40_000),
		"ampersands":     strings.Repeat("&", 20_000),
		"emoji":          strings.Repeat("😀", 20_000),
		"code":           "```\n" + strings.Repeat("if a < b && c > d {\n", 1500) + "```",
		"code, one line": "```\n" + strings.Repeat("<&>", 9000) + "\n```",
		"links":          strings.Repeat("[a](https://example.org/x?y=1&z=2) ", 1500),
		"lines":          strings.Repeat("\n", 5000) + strings.Repeat("- item\n", 3000),
		"mentions":       strings.Repeat("<!channel>", 3000),
		"nested fences":  strings.Repeat("```\na\n````\nb\n```\n", 500),
	} {
		parts := channels.Split(text, limits)
		for i, part := range parts {
			all := 0
			texts := sections(part)
			for _, s := range texts {
				n := channels.UTF16(s)
				all += n
				require.Truef(t, n <= maxSection && n != 0 && strings.Count(s, "```")%2 == 0 && !strings.Contains(s, "<!"),
					"%s: part %d has a section of %d characters: %.80q…", name, i, n, s)
			}
			assert.Truef(t, all <= maxAll && len(texts) <= 40,
				"%s: part %d has %d characters in %d sections", name, i, all, len(texts))
		}
	}
	assert.NoDiff(t, []string{"a ", "&amp; ", "b"}, splitLine("a &amp; b", 6))
}

func TestReceivedTextIsPlain(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"<@U0BOT> hello":                        "hello",
		"see <https://x.org|the docs> &amp; go": "see the docs (https://x.org) & go",
		"<https://x.org|x.org>":                 "https://x.org",
		"<mailto:a@x.org|a@x.org>":              "mailto:a@x.org",
		"<@U2> and <#C1|general> and <!here>":   "@U2 and #general and !here",
		"a &lt;b&gt; &amp;lt;":                  "a <b> &lt;",
	} {
		assert.Equal(t, want, plain(text, "U0BOT"))
	}
}
