package slack

import (
	"regexp"
	"strings"

	"github.com/lanekeeper/lanekeeper/channels"
)

// Limits of Slack, in characters.
const (
	maxSection = 3000
	maxPart    = 12_000 // of Markdown in one message
)

// length is an upper bound of a text's length in Slack after its escaping, in UTF-16 units.
func length(text string) int {
	return channels.UTF16(text) + 4*(strings.Count(text, "&")+strings.Count(text, "<")+strings.Count(text, ">"))
}

var escaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;")

// escape makes foreign text harmless: without < it mentions nobody and hides no link.
func escape(text string) string { return escaper.Replace(text) }

var unescaper = strings.NewReplacer("&lt;", "<", "&gt;", ">", "&amp;", "&")

var (
	fence   = regexp.MustCompile("^\\s{0,3}(```+|~~~+)")
	heading = regexp.MustCompile(`^\s{0,3}#{1,6}\s+(.*?)\s*#*\s*$`)
	bullet  = regexp.MustCompile(`^(\s*)[-*+]\s+(\[[ xX]\]\s+)?`)
	quote   = regexp.MustCompile(`^\s{0,3}>\s?`)
	rule    = regexp.MustCompile(`^\s{0,3}([-*_])(\s*[-*_]){2,}\s*$`)
	row     = regexp.MustCompile(`^\s*\|.*\|\s*$`)
	divider = regexp.MustCompile(`^\s*\|[\s:|-]+\|\s*$`)
	// span is a part of a line that is not plain: code, an image or a link, strong, emphasis, struck out.
	span = regexp.MustCompile("(`+)(.+?)(`+)" + `|!?\[([^\]\n]*)\]\(<?([^\s)>]+)>?(?:\s+"[^"]*")?\)` +
		`|(\*\*|__)(\S(?:.*?\S)?)(?:\*\*|__)|~~(\S(?:.*?\S)?)~~|\B\*(\S(?:[^*]*?\S)?)\*\B|\\([!-/:-@\[-` + "`" + `{-~])`)
	web = regexp.MustCompile(`^(https?://|mailto:)`)
)

// sections renders Markdown as texts of Slack's mrkdwn, each within the limit of a section.
func sections(markdown string) []string {
	var all []string
	var section strings.Builder
	size := 0
	flush := func() {
		if text := strings.Trim(section.String(), "\n"); text != "" {
			all = append(all, text)
		}
		section.Reset()
		size = 0
	}
	code := false
	write := func(line string) {
		n := channels.UTF16(line) + 1
		if size+n > maxSection-len("```\n```\n") {
			if code {
				section.WriteString("```")
			}
			flush()
			if code {
				section.WriteString("```\n")
			}
		}
		section.WriteString(line + "\n")
		size += n
	}
	for _, line := range lines(markdown) {
		for _, piece := range splitLine(line.text, maxSection-100) {
			if line.code != code {
				write("```")
				code = line.code
			}
			write(piece)
		}
	}
	if code {
		write("```")
	}
	flush()
	return all
}

// line is a rendered line.
type line struct {
	text string
	code bool
}

// lines renders the lines of a text. It renders the rows of a table as code, because Slack has no tables.
func lines(markdown string) []line {
	var all []line
	open := ""
	for text := range strings.SplitSeq(strings.ReplaceAll(markdown, "\r\n", "\n"), "\n") {
		mark := fence.FindStringSubmatch(text)
		switch {
		case mark != nil && open == "":
			open = mark[1]
		case mark != nil && strings.HasPrefix(mark[1], open):
			open = ""
		case open != "":
			all = append(all, line{code: true, text: noFence(escape(text))})
		case divider.MatchString(text):
		case row.MatchString(text):
			all = append(all, line{code: true, text: noFence(escape(strings.Trim(strings.TrimSpace(text), "|")))})
		default:
			all = append(all, line{text: renderLine(text)})
		}
	}
	return all
}

// noFence keeps code from ending its own block.
func noFence(text string) string { return strings.ReplaceAll(text, "```", "``\u200b`") }

func renderLine(text string) string {
	prefix := ""
	if cut := quote.FindString(text); cut != "" {
		prefix, text = "> ", text[len(cut):]
	}
	if match := heading.FindStringSubmatch(text); match != nil {
		return prefix + "*" + strings.ReplaceAll(renderSpans(match[1]), "*", "") + "*"
	}
	if rule.MatchString(text) {
		return prefix + "———"
	}
	if match := bullet.FindStringSubmatch(text); match != nil {
		mark := "• "
		if box := strings.TrimSpace(match[2]); box != "" {
			mark = map[bool]string{true: "☐ ", false: "☑ "}[box == "[ ]"]
		}
		prefix, text = prefix+match[1]+mark, text[len(match[0]):]
	}
	return prefix + renderSpans(text)
}

// renderSpans renders the spans of a line. It escapes all plain text.
func renderSpans(text string) string {
	var out strings.Builder
	for text != "" {
		at := span.FindStringSubmatchIndex(text)
		if at == nil {
			break
		}
		group := func(n int) string {
			if at[2*n] < 0 {
				return ""
			}
			return text[at[2*n]:at[2*n+1]]
		}
		out.WriteString(escape(text[:at[0]]))
		switch {
		case group(1) != "":
			out.WriteString("`" + strings.ReplaceAll(escape(group(2)), "`", "'") + "`")
		case group(5) != "":
			out.WriteString(link(group(4), group(5)))
		case group(7) != "":
			out.WriteString("*" + strings.ReplaceAll(renderSpans(group(7)), "*", "") + "*")
		case group(8) != "":
			out.WriteString("~" + renderSpans(group(8)) + "~")
		case group(9) != "":
			out.WriteString("_" + renderSpans(group(9)) + "_")
		default:
			out.WriteString(escape(group(10)))
		}
		text = text[at[1]:]
	}
	return out.String() + escape(text)
}

// link renders a web link. A longer link, or one of another scheme, becomes text.
func link(label, address string) string {
	const maxLink = 1000 // bytes; a link is never cut
	if !web.MatchString(address) || len(address)+len(label) > maxLink {
		return escape(label + " (" + address + ")")
	}
	address = strings.NewReplacer("|", "%7C", "<", "%3C", ">", "%3E", "&", "&amp;").Replace(address)
	if label == "" {
		return "<" + address + ">"
	}
	return "<" + address + "|" + strings.ReplaceAll(escape(label), "|", "¦") + ">"
}

// token is an indivisible part: an entity, a link, a character.
var token = regexp.MustCompile(`(?s)&[a-z]+;|<[^>]*>|.`)

// splitLine cuts a line into pieces of at most n units, at spaces if possible.
func splitLine(text string, n int) []string {
	if channels.UTF16(text) <= n {
		return []string{text}
	}
	var pieces []string
	start, space, size := 0, 0, 0
	for _, at := range token.FindAllStringIndex(text, -1) {
		size += channels.UTF16(text[at[0]:at[1]])
		if size > n && at[0] > start {
			end := at[0]
			if space > start {
				end = space
			}
			pieces = append(pieces, text[start:end])
			start, size = end, channels.UTF16(text[end:at[1]])
		}
		if text[at[0]:at[1]] == " " {
			space = at[1]
		}
	}
	return append(pieces, text[start:])
}

var reference = regexp.MustCompile(`<([^<>|]+)(?:\|([^<>]*))?>`)

// plain returns a received text without Slack's markup, with links and mentions as a person reads them.
func plain(text, self string) string {
	text = strings.TrimSpace(strings.ReplaceAll(text, "<@"+self+">", ""))
	text = reference.ReplaceAllStringFunc(text, func(match string) string {
		groups := reference.FindStringSubmatch(match)
		target, label := groups[1], groups[2]
		switch {
		case target[0] == '@' || target[0] == '#' || target[0] == '!':
			if label != "" {
				return target[:1] + strings.TrimLeft(label, "@#")
			}
			return target
		case label != "" && label != target && !strings.HasSuffix(target, label):
			return label + " (" + target + ")"
		}
		return target
	})
	return unescaper.Replace(text)
}
