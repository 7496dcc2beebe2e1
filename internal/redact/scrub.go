package redact

import (
	"slices"
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"
)

// scrub returns s without secrets, NUL and invalid UTF-8. It searches JSON inside s as JSON.
func scrub(s string, depth int) string {
	s = scannable(s)
	start := strings.TrimLeft(s, " \t\r\n")
	if depth >= maxDepth || start == "" || !strings.Contains(`{["`, start[:1]) {
		return scrubPlain(s)
	}
	tree, ok := parse([]byte(s))
	if !ok {
		return scrubPlain(s)
	}
	before := string(encode(tree))
	after := string(encode(walk(tree, depth)))
	if before == after {
		return s
	}
	return after
}

// scannable returns s in valid UTF-8, without NUL, and bounded.
func scannable(s string) string {
	const slack = 4 << 10
	if len(s) > maxScan {
		kept := s[:maxScan-slack]
		if space := strings.LastIndexAny(kept, " \t\r\n"); space > len(kept)-slack {
			kept = kept[:space]
		}
		s = strings.ToValidUTF8(kept, "\uFFFD") + cutMark(len(s)-len(kept))
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "")
}

// scrubPlain redacts text that is not JSON until nothing changes.
func scrubPlain(s string) string {
	const rounds = 4
	s = scannable(s)
	for range rounds {
		next := scrubOnce(s)
		if next == s {
			return s
		}
		s = next
	}
	return Marker
}

// scrubOnce redacts the visible secrets of a text, or else those that its invisible characters hide.
func scrubOnce(s string) string {
	if shown := visible(s); shown != s {
		if next := scrubVisible(shown); next != shown {
			return next
		}
	}
	return scrubVisible(s)
}

// scrubVisible redacts by shape and by name.
func scrubVisible(s string) string {
	return scrubNamed(scrubMarkup(scrubURLs(scrubDiscord(scrubTokens(s)))))
}

// databases are the schemes whose passwords may hold characters that other URLs escape.
var databases = [...]string{
	"postgres", "postgresql", "mysql", "mariadb", "redis", "rediss", "amqp", "amqps", "mongodb",
	"mongodb+srv", "nats", "sqlserver",
}

// scrubURLs redacts passwords in URLs, and user names long enough to be a token.
func scrubURLs(s string) string {
	const sign = "://"
	var out strings.Builder
	done := 0               // s up to here is written
	urlEnd, lastAt := 0, -1 // of the last URL; another URL may begin inside
	for at := 0; ; {
		next := strings.Index(s[at:], sign)
		if next < 0 {
			break
		}
		end := at + next
		at = end + len(sign)
		if at >= urlEnd {
			urlEnd = at + lengthOfURL(s[at:])
			lastAt = at + strings.LastIndexByte(s[at:urlEnd], '@')
		}
		if at > lastAt {
			continue
		}
		if from, to := passwordAt(s[:lastAt+1], schemeBefore(s[done:end]), at); from < to {
			out.WriteString(s[done:from])
			out.WriteString(Marker)
			done, at = to, to
		}
	}
	if done == 0 {
		return s
	}
	return out.String() + s[done:]
}

// lengthOfURL returns the length of the rest of a URL at the front of s.
func lengthOfURL(s string) int {
	if end := strings.IndexAny(s, " \t\r\n\"'`<>"); end >= 0 {
		return end
	}
	return len(s)
}

// passwordAt finds the secret part of the user information that begins at index i of s and ends with the last @ of the
// URL. If from equals to, there is none.
func passwordAt(s, scheme string, i int) (from, to int) {
	word := s[i:]
	if !slices.Contains(databases[:], scheme) {
		if end := strings.IndexAny(word, "/?#"); end >= 0 {
			word = word[:end]
		}
	}
	at := strings.LastIndexByte(word, '@')
	if scheme == "" || at < 0 {
		return i, i
	}
	if colon := strings.IndexByte(word[:at], ':'); colon >= 0 {
		return i + colon + 1, i + at
	}
	const tokenLength = 20
	if at >= tokenLength {
		return i, i + at
	}
	return i, i
}

// schemeBefore is the URL scheme that s ends with, in lower case.
func schemeBefore(s string) string {
	const longest = 20
	start := len(s)
	for start > 0 && len(s)-start < longest && (isName(s[start-1]) && s[start-1] != '_' || s[start-1] == '+') {
		start--
	}
	return strings.ToLower(s[start:])
}

// scrubMarkup removes the content of XML elements that have the name of a secret: <password>value</password>.
func scrubMarkup(s string) string {
	var out strings.Builder
	ends := endTags{text: s}
	done := 0 // the text before it is already written
	for at := 0; ; {
		next := strings.IndexByte(s[at:], '<')
		if next < 0 {
			break
		}
		at += next + 1
		from, to := contentAt(s, at, &ends)
		if from < to {
			out.WriteString(s[done:from])
			out.WriteString(Marker)
			done, at = to, to
		}
	}
	if done == 0 {
		return s
	}
	return out.String() + s[done:]
}

// contentAt finds the content of the element whose name begins at index i, if it is secret. An unclosed element
// contains the one word that follows its tag.
func contentAt(s string, i int, ends *endTags) (from, to int) {
	tag := tagAt(s, i)
	end := i + len(tag)
	name := tag[strings.LastIndexByte(tag, ':')+1:]
	how := classify(name)
	if how == ordinary {
		return i, i
	}
	attributes := strings.IndexAny(s[end:], "<>")
	if attributes < 0 || s[end+attributes] == '<' || strings.HasSuffix(s[end:end+attributes], "/") {
		return i, i
	}
	from = end + attributes + 1
	content := s[from:]
	if next := ends.next(from, tag); next >= 0 {
		content = s[from:next]
	} else if content == "" || !isWord(content[0]) {
		return i, i
	} else {
		content = content[:bareEnd(content)]
	}
	trimmed := strings.TrimSpace(content)
	if trimmed == Marker || spared(trimmed, how) || how == weak && strings.Contains(content, "<") {
		return i, i
	}
	return from, from + len(content)
}

// tagAt is the name of the tag at index i.
func tagAt(s string, i int) string {
	end := i
	for end < len(s) && end-i < longestName && (isName(s[end]) || s[end] == ':') {
		end++
	}
	return s[i:end]
}

// endTags finds the end tags of a text, each in one pass, for any number of names.
type endTags struct {
	text   string
	byName map[string][]int // the positions; the name is in lower case
}

// next returns the index of the first end tag of that name from index i on, or -1.
func (e *endTags) next(i int, name string) int {
	const sign = "</"
	if e.byName == nil {
		e.byName = map[string][]int{}
		for at := 0; ; at += len(sign) {
			next := strings.Index(e.text[at:], sign)
			if next < 0 {
				break
			}
			at += next
			found := strings.ToLower(tagAt(e.text, at+len(sign)))
			e.byName[found] = append(e.byName[found], at)
		}
	}
	all := e.byName[strings.ToLower(name)]
	at, _ := slices.BinarySearch(all, i)
	if at == len(all) {
		return -1
	}
	return all[at]
}

// A value in YAML may begin on the line after its name: as a block (name: |) of all lines with a larger indentation
// than the name, or as one word.

// yamlEnd returns the length of the end of a name's line at index i of s, if its value may begin on the next line: a
// block sign, or nothing. Otherwise it returns 0.
func yamlEnd(s string, i int) int {
	line := s[i:]
	if end := strings.IndexByte(line, '\n'); end >= 0 {
		line = line[:end+1]
	} else {
		return 0
	}
	sign := strings.TrimSpace(line)
	if comment := strings.Index(sign, " #"); comment >= 0 {
		sign = strings.TrimSpace(sign[:comment])
	}
	if sign == "" || sign[0] != '|' && sign[0] != '>' || strings.Trim(sign[1:], "+-0123456789") != "" {
		if sign == "" {
			return len(line)
		}
		return 0
	}
	return len(line)
}

// yamlScalar finds the value that begins on the line after the name, which ends at i+length.
func yamlScalar(s string, i, length int) (from, to int) {
	lineStart := strings.LastIndexByte(s[:i], '\n') + 1
	margin := indent(s[lineStart:])
	if strings.HasPrefix(s[lineStart+margin:], "- ") {
		margin += blanks(s[lineStart+margin+1:]) + 1
	}
	isBlock := strings.TrimSpace(s[i:i+length]) != ""
	from = i + length
	to = from
	for to < len(s) {
		end := len(s)
		if next := strings.IndexByte(s[to:], '\n'); next >= 0 {
			end = to + next + 1
		}
		line := s[to:end]
		if text := strings.TrimSpace(line); text != "" {
			if indent(line) <= margin {
				break
			}
			if !isBlock {
				return word(s, to, line)
			}
		} else if !isBlock {
			break
		}
		to = end
	}
	from, to = trimmedRange(s, from, to)
	if rest := strings.TrimPrefix(s[from:to], Marker); rest == "" || strings.HasPrefix(rest, cutPrefix) {
		return to, to
	}
	return from, to
}

// isEscapedBlock reports whether s begins with the sign of a block with escaped line breaks, as in a quoted text.
func isEscapedBlock(s string) bool {
	return s != "" && (s[0] == '|' || s[0] == '>') && strings.HasPrefix(strings.TrimLeft(s[1:], "+-0123456789 "), `\n`)
}

// word finds the value that is the one word of a line of s, which begins at index i. Several words are prose or names
// with values of their own.
func word(s string, i int, line string) (from, to int) {
	from, to = trimmedRange(s, i, i+len(line))
	text := s[from:to]
	isName := strings.HasSuffix(text, ":") || strings.HasPrefix(text, "-")
	if isName || strings.ContainsAny(text, " \t<>{}[]()") || spared(text, strong) {
		return i, i
	}
	return from, to
}

// indent counts the spaces and tabs at the front of a line.
func indent(line string) int { return blanks(line) }

// trimmedRange is a range of s without the blanks at its ends.
func trimmedRange(s string, from, to int) (int, int) {
	text := s[from:to]
	from += len(text) - len(strings.TrimLeft(text, " \t\r\n"))
	return from, from + len(strings.TrimSpace(text))
}

// Invisible characters and look-alike letters hide a name or a token from a search. Texts keep them, since emoji and
// many scripts need them. Only the search ignores them.

// visible returns s without its invisible characters.
func visible(s string) string {
	if isASCII(s) {
		return s
	}
	return strings.Map(func(r rune) rune {
		if invisible(r) {
			return -1
		}
		return r
	}, s)
}

// invisible reports whether a character has no width or shows nothing.
func invisible(r rune) bool {
	return r > unicode.MaxASCII &&
		(unicode.In(r, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector) || r == '\u2800')
}

// isASCII reports whether s has no other character.
func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}

// plain returns a name without invisible characters and accents, and wide or styled letters as the ordinary ones.
func plain(name string) string {
	if isASCII(name) {
		return name
	}
	return strings.Map(func(r rune) rune {
		if unicode.Is(unicode.Mn, r) {
			return -1
		}
		if base, ok := unaccented[unicode.ToLower(r)]; ok {
			return base
		}
		return r
	}, norm.NFKD.String(visible(name)))
}

// unaccented are Latin letters whose mark Unicode does not treat as an accent.
var unaccented = map[rune]rune{'ł': 'l', 'ø': 'o', 'đ': 'd', 'ı': 'i', 'ħ': 'h', 'ŧ': 't'}

// lookalikes are the letters of other scripts that look like a Latin one, in lower case.
var lookalikes = func() map[rune]rune {
	all := map[rune]rune{}
	for latin, others := range map[rune]string{
		'a': "аɑαᴀ", 'b': "ьвβɓʙ", 'c': "сϲᴄ", 'd': "ԁɗᴅ", 'e': "еҽεᴇ", 'f': "ғϝ", 'g': "ɡցɢ", 'h': "һнհʜ", 'i': "іιɩɪ",
		'j': "јϳᴊ", 'k': "кκᴋ", 'l': "ӏɭⅼʟ", 'm': "мμᴍ", 'n': "пոηɴ", 'o': "оοօσᴏ", 'p': "рρᴘ", 'q': "ԛգ",
		'r': "гɾʀ", 's': "ѕꜱ",
		't': "тτᴛ", 'u': "υսᴜ", 'v': "ѵνᴠ", 'w': "ԝωᴡ", 'x': "хχ", 'y': "уүγʏ", 'z': "ζᴢȥ",
	} {
		for _, r := range others {
			all[r] = latin
		}
	}
	return all
}()

// latin returns a name with the Latin letters that its letters look like.
func latin(name string) string {
	return strings.Map(func(r rune) rune {
		if looks, ok := lookalikes[unicode.ToLower(r)]; ok {
			return looks
		}
		return r
	}, name)
}
