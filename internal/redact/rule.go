package redact

import (
	_ "embed"
	"encoding/json"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
)

// rule recognizes one kind of secret by its shape.
type rule struct {
	name string
	// keywords are in lower case, with at least three bytes. The rule runs only at a keyword, in any letter case.
	keywords []string
	// back is the number of bytes of the secret before the keyword.
	back int
	// bounded demands that no letter, digit or underscore precedes the match.
	bounded bool
	// pattern is the expression to match there. Its first group is the secret; without a group, the whole match is.
	pattern string
	// find replaces look with code. from equal to to means no secret.
	find func(s string, at int) (from, to int)
}

// rules are all rules. They are immutable.
var rules = func() []rule {
	var all []rule
	for _, some := range [][]rule{keyBlocks, parameters, tokens, commands, readGitleaks()} {
		all = append(all, some...)
	}
	return all
}()

// gitleaksJSON holds the rules of gitleaks that know the shape of a secret, and names the others with the reason.
// The context of a secret is widened from source code to any text. Entropy and allowlists are dropped, so examples
// are redacted too. To add a rule of a newer version, add its line: keywords in lower case where the secret begins.
//
//go:embed gitleaks/rules.json
var gitleaksJSON []byte

// gitleaksRule is a rule in gitleaksJSON.
type gitleaksRule struct {
	Name     string   `json:"name"`
	Keywords []string `json:"keywords"`
	Back     int      `json:"back,omitempty"`
	Bounded  bool     `json:"bounded,omitempty"`
	Look     string   `json:"look"`
}

func readGitleaks() []rule {
	var file struct{ Rules []gitleaksRule }
	if err := json.Unmarshal(gitleaksJSON, &file); err != nil {
		panic("redact: gitleaks/rules.json: " + err.Error())
	}
	list := make([]rule, 0, len(file.Rules))
	for _, r := range file.Rules {
		list = append(list, rule{name: r.Name, keywords: r.Keywords, back: r.Back, bounded: r.Bounded, pattern: r.Look})
	}
	return list
}

// compiled caches the expressions of the rules in use.
var compiled = make([]atomic.Pointer[regexp.Regexp], len(rules))

// expression returns the compiled expression of a rule.
func expression(number int) *regexp.Regexp {
	if done := compiled[number].Load(); done != nil {
		return done
	}
	done := regexp.MustCompile(`\A(?:` + rules[number].pattern + `)`)
	compiled[number].Store(done)
	return done
}

// secretAt finds the secret of a rule whose keyword is at index i of s. It must not begin before from.
func secretAt(s string, from, i, number int) (start, end int) {
	r := &rules[number]
	at := i - r.back
	if at < from || r.bounded && !boundary(s, at) {
		return i, i
	}
	if r.find != nil {
		return r.find(s, at)
	}
	found := expression(number).FindStringSubmatchIndex(s[at:])
	if found == nil {
		return i, i
	}
	start, end = at+found[0], at+found[1]
	if len(found) > 2 && found[2] >= 0 {
		start, end = at+found[2], at+found[3]
	}
	for end < len(s) && isWord(s[end-1]) && isWord(s[end]) {
		end++ // a secret longer than the rule expects
	}
	if insideBase64(s, at, end) {
		return i, i
	}
	return start, end
}

// boundary reports whether a word can begin at index i of s: after a byte other than a letter, digit or underscore,
// or after an escape of JSON or of a URL.
func boundary(s string, i int) bool {
	if i == 0 || !isWord(s[i-1]) {
		return true
	}
	return i >= 2 && s[i-2] == '\\' && strings.IndexByte("nrtbf", s[i-1]) >= 0 ||
		i >= 3 && s[i-3] == '%' && isHex(s[i-2:i]) ||
		i >= 6 && s[i-6:i-4] == `\u` && isHex(s[i-4:i])
}

// insideBase64 reports whether a match is inside a long base64 text, such as a picture, where prefixes occur by
// chance.
func insideBase64(s string, from, to int) bool {
	const long = 64
	if from < long || s[from-1] != '+' && s[from-1] != '/' {
		return false
	}
	for _, b := range []byte(s[from-long : to]) {
		if !isBase64(b) {
			return false
		}
	}
	return true
}

func isLetter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }
func isDigit(b byte) bool  { return b >= '0' && b <= '9' }
func isWord(b byte) bool   { return isLetter(b) || isDigit(b) || b == '_' }
func isToken(b byte) bool  { return isWord(b) || b == '-' }
func isBase64(b byte) bool { return isLetter(b) || isDigit(b) || b == '+' || b == '/' }

// isHex reports whether s consists of hexadecimal digits.
func isHex(s string) bool {
	for _, b := range []byte(s) {
		if !isDigit(b) && (b|0x20 < 'a' || b|0x20 > 'f') {
			return false
		}
	}
	return true
}

// tokens are vendors' tokens that gitleaks does not know, or knows only at full length or beside the vendor's name.
// Here a prefix is enough, so that a cut token is recognized, too.
var tokens = []rule{
	prefixed("jwt", `eyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)*`, "eyj"),

	// Models.
	prefixed("openai and others", `sk-[A-Za-z0-9_-]{10,}`, "sk-"),
	prefixed("groq", `gsk_[A-Za-z0-9]{16,}`, "gsk_"),
	prefixed("xai", `xai-[A-Za-z0-9]{16,}`, "xai-"),
	prefixed("nvidia", `nvapi-[A-Za-z0-9_-]{16,}`, "nvapi-"),
	prefixed("cerebras", `csk-[A-Za-z0-9]{20,}`, "csk-"),
	prefixed("perplexity", `pplx-[A-Za-z0-9]{16,}`, "pplx-"),
	prefixed("replicate", `r8_[A-Za-z0-9]{20,}`, "r8_"),
	prefixed("hugging face", `hf_[A-Za-z0-9]{20,}`, "hf_"),
	prefixed("langsmith", `lsv2_[a-z]{2}_[a-f0-9_]{16,}`, "lsv2_"),
	prefixed("tavily", `tvly-[A-Za-z0-9-]{16,}`, "tvly-"),
	prefixed("pinecone", `pcsk_[A-Za-z0-9_]{16,}`, "pcsk_"),

	// Code and packages.
	prefixed("github", `gh[pousr]_[A-Za-z0-9]{10,}`, "ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
	prefixed("github fine-grained", `github_pat_[A-Za-z0-9_-]{10,}`, "github_pat_"),
	prefixed("gitlab", `glpat-[A-Za-z0-9_.-]{10,}`, "glpat-"),
	prefixed("npm", `npm_[A-Za-z0-9]{20,}`, "npm_"),
	prefixed("pypi", `pypi-Ag[A-Za-z0-9_-]{10,}`, "pypi-ag"),
	prefixed("docker", `dckr_[po]at_[A-Za-z0-9_-]{16,}`, "dckr_pat_", "dckr_oat_"),
	prefixed("sonar", `sq[upa]_[a-f0-9]{40}`, "squ_", "sqp_", "sqa_"),

	// Clouds and databases.
	prefixed("aws", `(?:AKIA|ASIA)[A-Z0-9]{16}\b`, "akia", "asia"),
	prefixed("google", `AIza[A-Za-z0-9_-]{30,}`, "aiza"),
	prefixed("google oauth", `ya29\.[A-Za-z0-9_-]{10,}`, "ya29."),
	prefixed("google client", `GOCSPX-[A-Za-z0-9_-]{16,}`, "gocspx-"),
	prefixed("google refresh", `1//0[A-Za-z0-9_-]{30,}`, "1//0"),
	prefixed("digitalocean", `do[opr]_v1_[A-Za-z0-9]{20,}`, "doo_v1_", "dop_v1_", "dor_v1_"),
	prefixed("databricks", `dapi[a-f0-9]{16,}(?:-\d)?`, "dapi"),
	prefixed("supabase", `sbp_[A-Za-z0-9_]{16,}`, "sbp_"),
	prefixed("supabase secret", `sb_secret_[A-Za-z0-9_-]{16,}`, "sb_secret_"),
	prefixed("vault", `hv[sbr]\.[A-Za-z0-9_-]{16,}`, "hvs.", "hvb.", "hvr."),
	prefixed("terraform", `\.atlasv1\.([A-Za-z0-9_=-]{20,})`, ".atlasv1."),
	prefixed("tailscale", `tskey-[a-z]+-[A-Za-z0-9-]{16,}`, "tskey-"),
	prefixed("doppler", `dp\.(?:pt|st|ct|sa|scim)\.[A-Za-z0-9._-]{20,}`, "dp.pt.", "dp.st.", "dp.ct.", "dp.sa.", "dp.scim."),
	prefixed("age", `AGE-SECRET-KEY-1[A-Z0-9]{20,}`, "age-secret-key-1"),

	// Payment, mail, work.
	prefixed("stripe", `[srp]k_(?:live|test)_[A-Za-z0-9]{8,}`,
		"sk_live_", "sk_test_", "rk_live_", "rk_test_", "pk_live_", "pk_test_"),
	prefixed("webhook secret", `whs(?:ec|k)_[A-Za-z0-9+/=_-]{6,}`, "whsec_", "whsk_"),
	prefixed("shopify", `shp[a-z]{2,3}_[A-Fa-f0-9]{16,}`,
		"shpat_", "shpca_", "shppa_", "shpss_", "shpua_", "shptka_"),
	prefixed("sendgrid", `SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}`, "sg."),
	prefixed("mailgun", `(?:pub)?key-[a-f0-9]{32}`, "key-", "pubkey-"),
	prefixed("linear", `lin_(?:api|oauth)_[A-Za-z0-9]{16,}`, "lin_api_", "lin_oauth_"),
	prefixed("atlassian", `AT[AC]TT3[A-Za-z0-9_=-]{20,}`, "atatt3", "atctt3"),
	prefixed("notion", `(?:ntn|secret)_[A-Za-z0-9]{40,}`, "ntn_", "secret_"),
	prefixed("figma", `fig[a-z]_[A-Za-z0-9_-]{20,}`, "figd_", "figu_", "figo_"),

	// Chat, and secret addresses.
	prefixed("slack", `(?:xox[a-z]|xapp)-[A-Za-z0-9-]{8,}`, slackKeywords()...),
	{
		name: "slack webhook", keywords: []string{"hooks.slack.com/"},
		pattern: `(?i)hooks\.slack\.com/[a-z]+/([A-Za-z0-9/]+)`,
	},
	{
		name: "discord webhook", keywords: []string{"discord.com/api/", "discordapp.com/api/"},
		pattern: `(?i)discord(?:app)?\.com/api/(?:v\d+/)?webhooks/\d+/([A-Za-z0-9_-]+)`,
	},
	{name: "teams webhook", keywords: []string{".webhook.office.com/"}, pattern: `(?i)\.webhook\.office\.com/([^\s"'<>]+)`},
	{
		name: "zapier webhook", keywords: []string{"hooks.zapier.com/hooks/"},
		pattern: `(?i)hooks\.zapier\.com/hooks/[a-z]+/([A-Za-z0-9/]+)`,
	},
	{
		name: "feishu webhook", keywords: []string{"/open-apis/bot/v2/hook/"},
		pattern: `(?i)/open-apis/bot/v2/hook/([A-Za-z0-9-]+)`,
	},
	{name: "ifttt webhook", keywords: []string{"/with/key/"}, pattern: `(?i)/with/key/([A-Za-z0-9_-]{10,})`},
	{name: "telegram", keywords: []string{":aa", "%3aaa"}, find: telegramToken},
}

// prefixed is a rule for a token that begins with its keyword.
func prefixed(name, look string, keywords ...string) rule {
	return rule{name: name, keywords: keywords, bounded: look[0] != '\\', pattern: look}
}

// slackKeywords are the prefixes xoxa- to xoxz- and xapp-.
func slackKeywords() []string {
	all := []string{"xapp-"}
	for kind := 'a'; kind <= 'z'; kind++ {
		all = append(all, "xox"+string(kind)+"-")
	}
	return all
}

// telegramToken finds the secret of a bot's token, after the bot's number and a colon.
func telegramToken(s string, at int) (from, to int) {
	const number, length = 6, 30
	digits := at
	for digits > 0 && at-digits < number && isDigit(s[digits-1]) {
		digits--
	}
	from = at + 1
	if s[at] == '%' {
		from = at + len("%3A")
	}
	to = from
	for to < len(s) && isToken(s[to]) {
		to++
	}
	if at-digits < number || to-from < length || s[from:from+2] != "AA" {
		return at, at
	}
	return from, to
}

// A rule runs only at one of its keywords. One pass over the text finds all keywords: a table indexes them by their
// first three bytes.

// keyword is a keyword of a rule.
type keyword struct {
	text string
	rule int
}

// keywordTable holds the keywords in buckets by the hash of their first three bytes. Slot 0 is empty.
type keywordTable struct {
	slots   [1 << tableBits]uint16
	buckets [][]keyword
}

const tableBits = 13

// keywords is the table of all rules.
var keywords = sync.OnceValue(func() *keywordTable {
	t := &keywordTable{buckets: make([][]keyword, 1)}
	for number := range rules {
		for _, text := range rules[number].keywords {
			slot := &t.slots[trigram(text[0], text[1], text[2])]
			if *slot == 0 {
				*slot = uint16(len(t.buckets))
				t.buckets = append(t.buckets, nil)
			}
			t.buckets[*slot] = append(t.buckets[*slot], keyword{text, number})
		}
	}
	return t
})

// trigram hashes three bytes, ignoring letter case.
func trigram(a, b, c byte) uint32 {
	const spread = 0x9E3779B1
	return ((uint32(a) | uint32(b)<<8 | uint32(c)<<16 | 0x202020) * spread) >> (32 - tableBits)
}

// scrubTokens redacts the matches of all rules. Of several, the longest counts.
func scrubTokens(s string) string {
	table := keywords()
	var out strings.Builder
	done := 0 // s up to here is written
	for i := 0; i+2 < len(s); i++ {
		bucket := table.slots[trigram(s[i], s[i+1], s[i+2])]
		if bucket == 0 {
			continue
		}
		from, to := i, i
		for _, k := range table.buckets[bucket] {
			if len(s)-i < len(k.text) || !strings.EqualFold(s[i:i+len(k.text)], k.text) {
				continue
			}
			if start, end := secretAt(s, done, i, k.rule); start < end && end > to {
				from, to = start, end
			}
		}
		if from < to && s[from:to] != Marker {
			out.WriteString(s[done:from])
			out.WriteString(Marker)
			done = to
			i = to - 1
		}
	}
	if done == 0 {
		return s
	}
	return out.String() + s[done:]
}

// keyBlocks are files of private keys. An unclosed block extends to the end of the text.
var keyBlocks = []rule{
	{
		name: "pem", keywords: []string{"-----begin"},
		pattern: `(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\z)`,
	},
	{
		name: "ssh2", keywords: []string{"---- begin ssh2"},
		pattern: `(?s)---- BEGIN SSH2 [A-Z ]*PRIVATE KEY ----.*?(?:---- END SSH2 [A-Z ]*PRIVATE KEY ----|\z)`,
	},
	{
		name: "putty", keywords: []string{"putty-user-key-file-"}, bounded: true,
		pattern: `(?s)PuTTY-User-Key-File-\d+:.*?(?:` + puttyEnd + `|\z)`,
	},
	{
		name: "putty private lines", keywords: []string{"private-lines:"}, bounded: true,
		pattern: `(?s)Private-Lines:\s*\d.*?(?:` + puttyEnd + `|\z)`,
	},
}

// puttyEnd is the last line of a PuTTY key.
const puttyEnd = `Private-(?:MAC|Hash):\s*[0-9A-Fa-f]*`

// Known applies hide, which redacts known secrets, to every text of a decoded JSON value, including keys. It changes
// lists in place. Of keys that become equal, one value stays.
func Known(value any, hide func(string) string) any {
	switch v := value.(type) {
	case string:
		return hide(v)
	case []any:
		for i := range v {
			v[i] = Known(v[i], hide)
		}
	case map[string]any:
		hidden := make(map[string]any, len(v))
		for key := range v {
			hidden[hide(key)] = Known(v[key], hide)
		}
		return hidden
	}
	return value
}

// parameters are parts of a URL or header that carry a secret under a short name.
var parameters = []rule{
	{
		name: "query", keywords: queryKeywords(),
		pattern: `(?i)(?:[?&]|0026|amp;)(?:key|sig|signature|code|x-(?:amz|goog)-signature)=([^&\s"'#]{8,})`,
	},
	{
		name: "bearer", keywords: []string{"bearer"}, bounded: true,
		pattern: `(?i)bearer[ \t]+([A-Za-z0-9._~+/=-]{6,})`,
	},
	{ // the letters that base64 gives a "user:password" are never all of one case
		name: "basic", keywords: []string{"basic"}, bounded: true,
		pattern: `(?:[Bb]asic|BASIC)[ \t]+([A-Za-z0-9+/]*(?:[a-z][A-Z]|[A-Z][A-Z]|[0-9])[A-Za-z0-9+/]*=*)`,
	},
}

// queryKeywords are the parameters with the preceding sign, also escaped for JSON and HTML.
func queryKeywords() []string {
	var all []string
	for _, sign := range []string{"?", "&", "0026", "amp;"} {
		for _, name := range []string{"key=", "sig=", "signature=", "code=", "x-amz-signature=", "x-goog-signature="} {
			all = append(all, sign+name)
		}
	}
	return all
}

// scrubDiscord redacts tokens of Discord bots. They have no prefix: the bot's number in base64, six characters of
// time, and a signature, joined by dots.
func scrubDiscord(s string) string {
	const middle, signature, least, most = 6, 27, 23, 28
	for i := 0; ; i++ {
		next := strings.IndexByte(s[i:], '.')
		if next < 0 {
			return s
		}
		i += next
		last := i + 1 + middle
		if last >= len(s) || s[last] != '.' || run(s[i+1:]) != middle || run(s[last+1:]) < signature {
			continue
		}
		from := i
		for from > 0 && i-from <= most && isToken(s[from-1]) {
			from--
		}
		if i-from < least || i-from > most || strings.IndexByte("MNO", s[from]) < 0 {
			continue
		}
		to := last + 1 + run(s[last+1:])
		s = s[:from] + Marker + s[to:]
		i = from + len(Marker)
	}
}

// run counts the token characters at the front of s.
func run(s string) int {
	for i := range len(s) {
		if !isToken(s[i]) {
			return i
		}
	}
	return len(s)
}
