package redact

import (
	"slices"
	"strings"
	"unicode"
)

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
	start := strings.TrimLeftFunc(content, unicode.IsSpace)
	if how == weak && strings.Contains(start, "<") || strings.HasPrefix(start, cutPrefix) {
		return i, i // without reading it all: many elements may share an end tag
	}
	if trimmed := strings.TrimSpace(start); trimmed == Marker || spared(trimmed, how) {
		return i, i
	}
	return from, from + len(content)
}

// tagAt returns the name of the tag at index i.
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
