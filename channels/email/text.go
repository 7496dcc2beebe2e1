package email

import (
	"regexp"
	"strings"

	"golang.org/x/net/html"
)

// hiddenStyle matches a style, without spaces, that hides an element.
var hiddenStyle = regexp.MustCompile(`display:none|visibility:hidden|font-size:0+(\.0+)?([a-z%!;]|$)`)

// renderer writes HTML as text.
type renderer struct {
	out    strings.Builder
	quotes int // quotations around the next word
	breaks int // line breaks before it
	space  bool
}

// plainText returns the visible text of HTML. Quotations begin with > as in a mail of plain text.
func plainText(source string) string {
	page, err := html.Parse(strings.NewReader(source))
	if err != nil { // the nesting is too deep
		return ""
	}
	r := renderer{}
	r.children(page)
	return strings.TrimSpace(r.out.String())
}

func (r *renderer) children(n *html.Node) {
	for child := n.FirstChild; child != nil; child = child.NextSibling {
		switch child.Type {
		case html.TextNode:
			r.text(child.Data)
		case html.ElementNode:
			r.element(child)
		default:
		}
	}
}

// element writes an element as text. It drops hidden elements and those without text for a reader, marks quotes and
// list items, and appends the address of a link that its text does not show.
func (r *renderer) element(n *html.Node) {
	link, hidden := "", false
	for _, a := range n.Attr {
		style := strings.ReplaceAll(strings.ToLower(a.Val), " ", "")
		switch {
		case a.Key == "hidden", a.Key == "style" && hiddenStyle.MatchString(style):
			hidden = true
		case a.Key == "href" && (strings.HasPrefix(a.Val, "https://") || strings.HasPrefix(a.Val, "http://")):
			link = a.Val
		}
	}
	if hidden {
		return
	}
	switch n.Data {
	case "head", "script", "style", "template", "noscript", "object", "iframe", "svg", "math":
		return
	case "br":
		r.breaks++
	}
	r.newline(n.Data)
	switch n.Data {
	case "blockquote":
		r.quotes++
		defer func() { r.quotes-- }()
	case "li":
		r.write("-")
		r.space = true
	}
	before := r.out.Len()
	r.children(n)
	if link != "" && !strings.Contains(r.out.String()[before:], link) {
		r.text(" (" + link + ")")
	}
	r.newline(n.Data)
}

// newline begins a new line before and after a block.
func (r *renderer) newline(name string) {
	switch name {
	case "p", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "table", "ul", "ol":
		r.breaks = max(r.breaks, 2)
	case "div", "tr", "li", "section", "article", "header", "footer", "dt", "dd":
		r.breaks = max(r.breaks, 1)
	case "td", "th":
		r.space = true
	}
}

func (r *renderer) text(s string) {
	words := strings.Fields(s)
	if len(words) == 0 {
		r.space = r.space || s != ""
		return
	}
	r.space = r.space || strings.TrimLeft(s, " \t\r\n") != s
	r.write(strings.Join(words, " "))
	r.space = strings.TrimRight(s, " \t\r\n") != s
}

func (r *renderer) write(words string) {
	if r.out.Len() == 0 {
		r.out.WriteString(strings.Repeat("> ", min(r.quotes, 10)))
	} else if r.breaks > 0 {
		r.out.WriteString(strings.Repeat("\n"+strings.Repeat("> ", min(r.quotes, 10)), min(r.breaks, 2)))
	} else if r.space {
		r.out.WriteByte(' ')
	}
	r.breaks, r.space = 0, false
	r.out.WriteString(words)
}

// withoutQuote cuts the quoted history at the end of a reply, and the line that introduces it. It keeps a quotation
// with an answer below it, and a mail without other text.
func withoutQuote(text, own string) string {
	lines := strings.Split(strings.TrimSuffix(text, longerNote), "\n")
	end := len(lines)
	for end > 0 && (strings.HasPrefix(strings.TrimSpace(lines[end-1]), ">") || strings.TrimSpace(lines[end-1]) == "") {
		end--
	}
	quoted := false
	for _, l := range lines[end:] {
		quoted = quoted || strings.HasPrefix(strings.TrimSpace(l), ">")
	}
	if quoted {
		end = beforeIntroduction(lines, end)
	} else {
		end = beforeHeader(lines, own)
	}
	if left := strings.TrimSpace(strings.Join(lines[:end], "\n")); left != "" && end < len(lines) {
		return left
	}
	return text
}

// beforeIntroduction removes "On Monday, the shop <shop@example.com> wrote:", also over two lines.
func beforeIntroduction(lines []string, end int) int {
	if end == 0 || !strings.HasSuffix(strings.TrimSpace(lines[end-1]), ":") {
		return end
	}
	end--
	if !strings.ContainsAny(lines[end], "0123456789") && end > 0 && strings.ContainsAny(lines[end-1], "0123456789") &&
		strings.TrimSpace(lines[end-1]) != "" {
		end--
	}
	return end
}

// beforeHeader removes the copy that Outlook adds: a line From: with the channel's own address, and all below.
func beforeHeader(lines []string, own string) int {
	for i, l := range lines {
		_, sender, ok := strings.Cut(strings.Trim(l, " *\r"), ":")
		local, domain, _ := strings.Cut(own, "@")
		sender = strings.ToLower(sender)
		if !ok || !strings.Contains(sender, "@"+domain) || !strings.Contains(sender, local) || i == 0 {
			continue
		}
		for i > 0 && strings.Trim(lines[i-1], " _-\r") == "" {
			i--
		}
		if i > 0 && strings.Contains(lines[i-1], "-----") {
			i--
		}
		return i
	}
	return len(lines)
}
