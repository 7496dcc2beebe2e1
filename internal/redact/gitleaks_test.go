package redact

import (
	"bytes"
	"encoding/json"
	"flag"
	"maps"
	"os"
	"regexp"
	"regexp/syntax"
	"slices"
	"strings"
	"testing"

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"

	"github.com/lanekeeper/lanekeeper/internal/require"
)

var update = flag.Bool("update", false, "write gitleaks/rules.json")

// gitleaksVersion is the version of github.com/zricethezav/gitleaks/v8 that the folder gitleaks holds, unchanged. To
// renew it: copy config/gitleaks.toml and LICENSE of a newer version there, change the version here, run
// go test ./internal/redact -run TestGitleaks -update, and read which rules gitleaks/rules.json gained and left out.
const gitleaksVersion = "v8.30.1"

// begins are the keywords of taken rules whose own keyword does not stand where the secret begins, or is too short.
var begins = map[string]rule{
	"airtable-personnal-access-token": {keywords: []string{"pat"}},
	"azure-ad-client-secret":          {keywords: digitKeywords("q~"), back: 3},
	"cloudflare-origin-ca-key":        {keywords: []string{"v1.0-"}},
	"dropbox-short-lived-api-token":   {keywords: []string{"sl."}},
	"intra42-client-secret":           {keywords: []string{"s-s4t2ud-", "s-s4t2af-"}},
	"lob-api-key":                     {keywords: []string{"live_", "test_"}},
	"lob-pub-api-key":                 {keywords: []string{"live_pub_", "test_pub_"}},
	"mailchimp-api-key":               {keywords: []string{"-us"}, back: 32},
	"maxmind-license-key":             {keywords: []string{"_mmk"}, back: 36},
	"openai-api-key":                  {keywords: []string{"sk-"}},
	"plaid-api-token":                 {keywords: []string{"access-sandbox-", "access-development-", "access-production-"}},
	"sourcegraph-access-token":        {keywords: []string{"sgp_"}},    // not 40 hexadecimal digits, which are a commit
	"square-access-token":             {keywords: []string{"sq0atp-"}}, // not EAAA, which pictures in base64 have
	"twilio-api-key":                  {keywords: hexKeywords("sk"), bounded: true},
	"vault-service-token":             {keywords: []string{"hvs."}}, // not s. and 24 letters, a method in Go
	"yandex-access-token":             {keywords: []string{"t1."}},
	"yandex-api-key":                  {keywords: []string{"aqvn"}},

	"defined-networking-api-token": {keywords: []string{"dnkey-"}},
	"new-relic-browser-api-token":  {keywords: []string{"nrjs-"}},
	"new-relic-insert-key":         {keywords: []string{"nrii-"}},
	"new-relic-user-api-key":       {keywords: []string{"nrak-"}},
	"typeform-api-token":           {keywords: []string{"tfp_"}},
}

// hexKeywords are a prefix that is too short for a keyword with each hexadecimal digit after it.
func hexKeywords(prefix string) []string {
	var all []string
	for _, digit := range "0123456789abcdef" {
		all = append(all, prefix+string(digit))
	}
	return all
}

// digitKeywords are a suffix with each digit before it.
func digitKeywords(suffix string) []string {
	var all []string
	for _, digit := range "0123456789" {
		all = append(all, string(digit)+suffix)
	}
	return all
}

// leftOut are the rules that are not taken, by reason. Rules that need the vendor's name beside the value and know
// nothing else of it are not among them: see [noShape].
var leftOut = map[string][]string{
	"names: scrubNamed finds what stands under the name of a secret, whatever it looks like": {
		"generic-api-key", "hashicorp-tf-password", "freemius-secret-key", "nuget-config-password",
	},
	"ours is wider: commands, key blocks, URLs, webhooks": {
		"curl-auth-header", "curl-auth-user", "private-key", "sidekiq-sensitive-url", "slack-webhook-url", "jwt",
		"microsoft-teams-webhook",
		"mailgun-private-api-token", "mailgun-pub-key", "telegram-bot-api-token", "hashicorp-tf-api-token",
		"sonar-api-token", "mapbox-api-token",
	},
	"a file, or a rule for whole files of one kind":              {"pkcs12-file", "kubernetes-secret-yaml"},
	"an id in upper case (a ULID after API-) has this shape":     {"octopus-deploy-api-key"},
	"begins with digits, so every number would have to be tried": {"facebook-access-token"},
	"zeros in base64, as pictures have them, have this shape":    {"twitter-bearer-token", "dropbox-long-lived-api-token"},
	"the shape is so short that names in snake case and ids have it": {
		"beamer-api-token", "gocardless-api-token", "okta-access-token", "yandex-aws-access-token", "sumologic-access-id",
		"sidekiq-secret",
	},
}

// beside is what gitleaks writes between a vendor's name and the secret.
const beside = `(?:=|>|:{1,3}=|\|\||:|=>|\?=|,)[\x60'"\s=]{0,5}`

// noShape reports whether a rule knows of its secret only the vendor's name beside it and how many letters and digits
// it has. An id, a hash or a UUID beside the name would be taken for the secret. Where the name says more than the
// vendor (…_KEY, …_TOKEN), scrubNamed finds the value.
func noShape(look string) bool {
	_, secret, found := strings.Cut(look, beside)
	secret, _, _ = strings.Cut(secret, `(?:[\x60`)
	return found && regexp.MustCompile(`^\((?:\[[^]]*\](?:\{[0-9,]+\})?|-)+\)$`).MatchString(secret)
}

// after are the ends of gitleaks' rules: what has to follow a secret in source code. In a log a comma, a full stop or
// a bracket may follow.
var after = []string{
	`(?:[\x60'"\s;]|\\[nr]|$|\b)`, `(?:[\x60'"\s;]|\\[nr]|$)`, `(?:[^\w-]|\z)`, `(?:[^a-zA-Z0-9+/]|\z)`, `(?:$|[\\'"\x60\s<),])`,
}

// taken makes a rule of one of gitleaks.
func taken(id, look string, keywords []string) rule {
	r := rule{name: id, keywords: keywords, pattern: look}
	if other, ok := begins[id]; ok {
		r.keywords, r.back, r.bounded = other.keywords, other.back, other.bounded
	}
	if before, secret, found := strings.Cut(look, beside); found {
		r.bounded, r.pattern = true, secret
		if strings.HasPrefix(before, "(?i)") {
			r.pattern = "(?i)" + secret
		}
	}
	if start := `(?:^|[\\'"\x60\s>=:(,)])`; strings.HasPrefix(look, start) {
		r.bounded, r.pattern = true, strings.TrimPrefix(look, start)
	}
	r.bounded = r.bounded || strings.HasPrefix(strings.TrimPrefix(look, "(?i)"), `\b`)
	for _, end := range after {
		if secret, found := strings.CutSuffix(r.pattern, end); found {
			r.pattern = "(" + secret + `)(?:[^\w-]|$)`
			break
		}
	}
	return r
}

// sourceRule is a rule of gitleaks.toml.
type sourceRule struct {
	ID, Regex string
	Keywords  []string
}

// kept are the rules of the file, in its order, with those that are left out.
func kept(t *testing.T) []sourceRule {
	t.Helper()
	var file struct {
		Rules []sourceRule
	}
	if _, err := toml.DecodeFile("gitleaks/gitleaks.toml", &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Rules) < 200 {
		t.Fatalf("gitleaks.toml has %d rules", len(file.Rules))
	}
	return file.Rules
}

// The rules are those of gitleaks.toml, and each that is not taken has a reason.
func TestGitleaksRulesAreTakenOrLeftOutByName(t *testing.T) {
	reasons := map[string]string{}
	for reason, ids := range leftOut {
		for _, id := range ids {
			reasons[id] = reason
		}
	}
	var want []rule
	not := map[string][]string{}
	changed := maps.Clone(begins)
	for _, r := range kept(t) {
		reason, out := reasons[r.ID]
		delete(reasons, r.ID)
		delete(changed, r.ID)
		if noShape(r.Regex) {
			if out {
				t.Errorf("%s needs no reason: it has no shape", r.ID)
			}
			reason, out = "the vendor's name and a number of letters and digits, which ids, hashes and UUIDs have too", true
		}
		if out {
			not[reason] = append(not[reason], r.ID)
		} else {
			want = append(want, taken(r.ID, r.Regex, r.Keywords))
		}
	}
	for id := range reasons {
		t.Errorf("leftOut has %s, which gitleaks.toml has not", id)
	}
	for id := range changed {
		t.Errorf("begins has %s, which gitleaks.toml has not", id)
	}
	source := encodeRules(t, want, not)
	if *update {
		require.NoError(t, os.WriteFile("gitleaks/rules.json", source, 0o644))
	}
	have, err := os.ReadFile("gitleaks/rules.json")
	require.NoError(t, err)
	if diff := cmp.Diff(string(source), string(have)); diff != "" {
		t.Errorf("rules.json does not agree with gitleaks.toml; run this test with -update (-want +got):\n%s", diff)
	}
}

// encodeRules writes the kept rules as JSON, one a line, and the left-out rules by reason.
func encodeRules(t *testing.T, kept []rule, leftOut map[string][]string) []byte {
	t.Helper()
	var b bytes.Buffer
	lines := json.NewEncoder(&b)
	lines.SetEscapeHTML(false)
	encode := func(before string, v any, after string) {
		b.WriteString(before)
		require.NoError(t, lines.Encode(v))
		b.Truncate(b.Len() - 1) // the encoder's newline
		b.WriteString(after)
	}
	encode("{\n\"source\": ", "config/gitleaks.toml of github.com/zricethezav/gitleaks/v8 "+gitleaksVersion+", MIT License", ",\n\"rules\": [")
	for i, r := range kept {
		separator := "\n"
		if i > 0 {
			separator = ",\n"
		}
		encode(separator, gitleaksRule{Name: r.name, Keywords: r.keywords, Back: r.back, Bounded: r.bounded, Look: r.pattern}, "")
	}
	b.WriteString("\n],\n\"left_out\": {")
	for i, reason := range slices.Sorted(maps.Keys(leftOut)) {
		separator := "\n"
		if i > 0 {
			separator = ",\n"
		}
		encode(separator, reason, ": ")
		encode("", leftOut[reason], "")
	}
	b.WriteString("\n}\n}\n")
	return b.Bytes()
}

// Every rule finds what has its shape, from its first character to its last.
func TestEveryRuleFindsItsShape(t *testing.T) {
	for number := range rules {
		r := &rules[number]
		t.Run(r.name, func(t *testing.T) {
			if len(r.keywords) == 0 {
				t.Fatal("the rule has no keyword")
			}
			for _, k := range r.keywords {
				if len(k) < 3 || k != strings.ToLower(k) {
					t.Errorf("%q cannot be a keyword", k)
				}
			}
			if r.find != nil {
				return // commands and others have tests of their own
			}
			for seed := range uint64(20) {
				secret := example(t, r, seed)
				for _, around := range [][2]string{
					{"", ""}, {"a ", " z"}, {`{"a":"`, `"}`}, {"(", ")"}, {"x=", ", y"}, {`line\n`, `\nline`},
				} {
					text := around[0] + secret + around[1]
					got := Text(text, 1<<20)
					if strings.Contains(got, secret) || !strings.Contains(got, Marker) {
						t.Fatalf("Text(%q) = %q", text, got)
					}
				}
			}
		})
	}
}

// example makes a text that a rule matches, of random letters.
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
	default: // what has no width
	}
}
