package channels_test

import (
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/channels"
	"github.com/lanekeeper/lanekeeper/channels/telegram"
	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// Parts are within the limit in any unit, lose no word, and close their code blocks.
func TestSplit(t *testing.T) {
	t.Parallel()
	limits := channels.Limits{Text: 200, Length: channels.UTF16}
	text := strings.Repeat("Ein 😀 Satz. ", 40) + "\n\n```go\n" + strings.Repeat("x := \"😀\"\n", 60) + "```\n\n" +
		strings.Repeat("wort", 200)
	parts := channels.Split(text, limits)
	for i, p := range parts {
		n := channels.UTF16(p)
		assert.Truef(t, n <= 200 && n != 0, "part %d has %d units", i, n)
		assert.Truef(t, strings.Count(p, "```")%2 == 0, "part %d has an open code block:\n%s", i, p)
	}
	all := strings.Join(parts, "\n")
	assert.Equal(t, 40, strings.Count(all, "Satz."))
	assert.Equal(t, 60, strings.Count(all, "x := \"😀\""))
	assert.Equal(t, 200, strings.Count(all, "w"))
	assert.Equal(t, 1, len(channels.Split("", limits)))
	assert.Equal(t, 4, len(channels.Split(strings.Repeat("`", 80)+"\n"+strings.Repeat("wort", 120), limits)))
}

func TestHTMLOfTelegram(t *testing.T) {
	t.Parallel()
	for markdown, want := range map[string]string{
		"# Head\n\n**bold** _i_ ~~s~~ `a<b`":               "<b>Head</b>\n\n<b>bold</b> <i>i</i> <s>s</s> <code>a&lt;b</code>",
		"- one\n- two\n  1. inner":                         "• one\n• two\n   1. inner",
		"```go\na && b\n```":                               "<pre><code class=\"language-go\">a &amp;&amp; b</code></pre>",
		"[web](https://a.b/?c=\"d\") [js](javascript:x)":   "<a href=\"https://a.b/?c=&#34;d&#34;\">web</a> js",
		"<script>alert(1)</script> & <b>x</b>":             "&lt;script&gt;alert(1)&lt;/script&gt; &amp; &lt;b&gt;x&lt;/b&gt;",
		"<pre>\na\n</pre> b\n\nc":                          "&lt;pre&gt;\na\n&lt;/pre&gt; b\n\nc",
		`1\. \*a\* &amp; &copy; &#65;`:                     "1. *a* &amp; © A",
		"`\\*` `&amp;`":                                    "<code>\\*</code> <code>&amp;amp;</code>",
		"[a](https://a.b/f\\_g?a=1&amp;b=2)":               "<a href=\"https://a.b/f_g?a=1&amp;b=2\">a</a>",
		"- run:\n  ```\n  if a:\n      b\n  ```\n  then c": "• run:\n   <pre><code>if a:\n    b</code></pre>\n   then c",
		"| a | b |\n|---|---|\n| 1 | 2 |":                  "<pre>a | b\n1 | 2</pre>",
		"a\n\n---\n\n![plan](https://a.b/p.png)":           "a\n\n———\n\n<a href=\"https://a.b/p.png\">plan</a>",
		"> quoted":                                         "<blockquote>quoted</blockquote>",
	} {
		assert.Equal(t, want, telegram.HTML(markdown))
	}
}
