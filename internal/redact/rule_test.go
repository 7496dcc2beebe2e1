package redact

import (
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"testing"

	"github.com/lanekeeper/lanekeeper/internal/assert"
	"github.com/lanekeeper/lanekeeper/internal/require"
)

// Every rule finds a text of its shape, from the first character to the last.
func TestEveryRuleMatchesItsPattern(t *testing.T) {
	for number := range rules {
		r := &rules[number]
		t.Run(r.name, func(t *testing.T) {
			require.True(t, len(r.keywords) > 0, "the rule has no keyword")
			for _, k := range r.keywords {
				assert.Truef(t, len(k) >= 3 && k == strings.ToLower(k), "%q cannot be a keyword", k)
			}
			if r.find != nil {
				return // commands and others have their own tests
			}
			for seed := range uint64(20) {
				secret := example(t, r, seed)
				for _, around := range [][2]string{
					{"", ""}, {"a ", " z"}, {`{"a":"`, `"}`}, {"(", ")"}, {"x=", ", y"}, {`line\n`, `\nline`},
				} {
					text := around[0] + secret + around[1]
					got := Text(text, 1<<20)
					require.Truef(t, !strings.Contains(got, secret) && strings.Contains(got, Marker), "Text(%q) = %q", text, got)
				}
			}
		})
	}
}

// example returns a random text that a rule matches.
func example(t *testing.T, r *rule, seed uint64) string {
	t.Helper()
	tree, err := syntax.Parse(r.pattern, syntax.Perl)
	require.NoError(t, err)
	matcher := regexp.MustCompile(`\A(?:` + r.pattern + `)`)
	for try := range uint64(1000) {
		g := generator{state: seed*1000 + try + 1}
		g.write(tree)
		made := g.out.String()
		at := min(r.back, len(made))
		begins := slices.ContainsFunc(r.keywords, func(k string) bool {
			return len(made) >= at+len(k) && strings.EqualFold(made[at:at+len(k)], k)
		})
		if begins && matcher.MatchString(made) {
			return made
		}
	}
	t.Fatalf("no text that matches %s begins with one of %q", r.pattern, r.keywords)
	return ""
}

// generator writes texts that match an expression.
type generator struct {
	out   strings.Builder
	state uint64
}

func (g *generator) number(below int) int {
	g.state = g.state*6364136223846793005 + 1442695040888963407
	return int(g.state>>33) % below
}

func (g *generator) write(tree *syntax.Regexp) {
	switch tree.Op {
	case syntax.OpLiteral:
		for _, r := range tree.Rune {
			g.out.WriteRune(r)
		}
	case syntax.OpCharClass:
		for range 100 {
			pair := 2 * g.number(len(tree.Rune)/2)
			low, high := tree.Rune[pair], min(tree.Rune[pair+1], 'z')
			if low <= high {
				g.out.WriteRune(low + rune(g.number(int(high-low)+1)))
				return
			}
		}
	case syntax.OpAnyChar, syntax.OpAnyCharNotNL:
		g.out.WriteByte('.')
	case syntax.OpConcat, syntax.OpCapture:
		for _, sub := range tree.Sub {
			g.write(sub)
		}
	case syntax.OpAlternate:
		g.write(tree.Sub[g.number(len(tree.Sub))])
	case syntax.OpQuest, syntax.OpStar, syntax.OpPlus, syntax.OpRepeat:
		low, high := tree.Min, tree.Max
		if tree.Op != syntax.OpRepeat {
			low, high = 0, 1
		}
		if tree.Op == syntax.OpPlus {
			low = 1
		}
		if high < 0 || tree.Op == syntax.OpStar || tree.Op == syntax.OpPlus {
			high = low + 9
		}
		for range low + g.number(min(high-low, 9)+1) {
			g.write(tree.Sub[0])
		}
	default: // an empty match
	}
}
